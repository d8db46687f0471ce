// The stream of the engine's steps, reconnected for as long as the page is looked at.

import { call, eventsOf } from './server.js';

const RETRY_MS = 1000;
const SILENCE_MS = 5000; // the server says something every second

export class StepFeed {
  #handlers;
  #abort = null;

  /** onNews(news): one StepNews. onState(words): 'ready', or why not. onRefused(message): a key
   *  is needed. */
  constructor(handlers) {
    this.#handlers = handlers;
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  restart() {
    this.stop();
    this.#abort = new AbortController();
    void this.#follow(this.#abort.signal);
  }

  async #follow(signal) {
    while (!signal.aborted) {
      try {
        await this.#read(signal);
      } catch (error) {
        if (signal.aborted) return;
        this.#handlers.onState(error.status === 401 ? 'key needed' : 'no connection');
        if (error.status === 401) {
          this.#handlers.onRefused(error.message);
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  async #read(signal) {
    const silence = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
    };
    heard();
    try {
      const response = await call('live', { signal: AbortSignal.any([signal, silence.signal]) });
      for await (const { event, data } of eventsOf(response)) {
        heard();
        const message = JSON.parse(data);
        if (event === 'message') this.#handlers.onNews(message);
        else if (message.ready) this.#handlers.onState('ready');
        else this.#handlers.onState(message.news || 'engine not ready');
      }
    } finally {
      clearTimeout(timer);
    }
    if (!signal.aborted) this.#handlers.onState('no connection');
  }
}
