// The playground: a conversation that streams, its settings, and how to stop and try again.

import { Answer } from './answer.js';
import { call, eventsOf } from './server.js';

const byId = (id) => document.getElementById(id);

const NUMBERS = [
  'temperature', 'top_p', 'min_p', 'top_k', 'max_tokens', 'seed',
  'repetition_penalty', 'presence_penalty', 'frequency_penalty',
];
const WITH_SLIDER = { temperature: 1, top_p: 1, min_p: 0 }; // where the slider rests

const EXAMPLES = [
  'Explain in two sentences what a KV cache is.',
  'Write a haiku about a furnace.',
  'List five animals, one per line.',
];

export class Playground {
  #model = null;
  #name = 'model';
  #turns = []; // {role, content, element}
  #abort = null;
  #onRefused;

  /** onRefused(message): the server wants a key. */
  constructor(onRefused) {
    this.#onRefused = onRefused;
    this.#fillSettings();
    for (const text of EXAMPLES) {
      const button = Object.assign(document.createElement('button'), {
        type: 'button',
        textContent: text,
      });
      button.addEventListener('click', () => this.#send(text));
      const item = document.createElement('li');
      item.append(button);
      byId('examples').append(item);
    }
    byId('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#send(byId('prompt').value);
    });
    byId('prompt').addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send(byId('prompt').value);
      }
    });
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.#abort?.abort();
    });
    byId('stop').addEventListener('click', () => this.#abort?.abort());
    byId('retry').addEventListener('click', () => this.#retry());
    byId('clear').addEventListener('click', () => this.#clear());
  }

  /** The model that answers, as /v1/models describes it, and what to call it. */
  use(model, name) {
    this.#model = model.id;
    this.#name = name;
    if (model.max_model_len) byId('max_tokens').max = model.max_model_len;
  }

  #fillSettings() {
    byId('settings').open = matchMedia('(min-width: 62rem)').matches;
    for (const name of NUMBERS) byId(name).placeholder ||= 'default';
    for (const [name, rest] of Object.entries(WITH_SLIDER)) {
      const [slider, field] = [byId(`${name}-range`), byId(name)];
      slider.value = rest;
      slider.addEventListener('input', () => (field.value = slider.value));
      field.addEventListener('input', () => (slider.value = field.value || rest));
    }
    byId('sampling').addEventListener('reset', () => {
      queueMicrotask(() => {
        for (const [name, rest] of Object.entries(WITH_SLIDER)) byId(`${name}-range`).value = rest;
      });
    });
    byId('sampling').addEventListener('submit', (event) => event.preventDefault());
  }

  /** Only what was set: the rest is the model's own choice. */
  #settings() {
    const settings = {};
    for (const name of NUMBERS) {
      const value = byId(name).valueAsNumber;
      if (!Number.isNaN(value)) settings[name] = value;
    }
    if (byId('logprobs').checked) Object.assign(settings, { logprobs: true, top_logprobs: 4 });
    return settings;
  }

  #messages() {
    const messages = this.#turns
      .filter(({ content }) => content)
      .map(({ role, content }) => ({ role, content }));
    const system = byId('system').value.trim();
    return system ? [{ role: 'system', content: system }, ...messages] : messages;
  }

  #send(text) {
    if (!text.trim() || this.#abort) return;
    byId('prompt').value = '';
    const element = document.createElement('article');
    element.className = 'message asked';
    const who = Object.assign(document.createElement('h3'), { className: 'who', textContent: 'You' });
    const body = Object.assign(document.createElement('div'), { className: 'body', textContent: text });
    element.append(who, body);
    this.#add({ role: 'user', content: text, element });
    void this.#answer();
  }

  #retry() {
    if (this.#abort || !this.#turns.length) return;
    if (this.#turns.at(-1).role === 'assistant') this.#turns.pop().element.remove();
    void this.#answer();
  }

  #clear() {
    this.#abort?.abort();
    for (const turn of this.#turns) turn.element.remove();
    this.#turns = [];
    this.#isBusy(false);
    byId('empty').hidden = false;
    byId('chat-status').textContent = '';
    byId('prompt').focus();
  }

  #add(turn) {
    byId('empty').hidden = true;
    this.#turns.push(turn);
    byId('log').append(turn.element);
    turn.element.scrollIntoView({ block: 'nearest' });
  }

  async #answer() {
    const abort = new AbortController();
    this.#abort = abort;
    const messages = this.#messages();
    const answer = new Answer(this.#name);
    const turn = { role: 'assistant', content: '', element: answer.element };
    this.#add(turn);
    this.#isBusy(true);
    this.#say('answering …');
    try {
      const end = await this.#stream(answer, messages, abort.signal);
      this.#follow(() => answer.finish(end));
      this.#say('answered');
    } catch (error) {
      if (abort.signal.aborted) {
        answer.finish('stopped');
        this.#say('stopped');
      } else {
        answer.fail(error.message);
        this.#say('failed');
        if (error.status === 401) this.#onRefused(error.message);
      }
    }
    turn.content = answer.text;
    if (this.#abort === abort) {
      this.#abort = null;
      this.#isBusy(false);
    }
  }

  /** Throws what goes wrong; returns the finish reason. */
  async #stream(answer, messages, signal) {
    const body = {
      model: this.#model ?? undefined,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      ...this.#settings(),
    };
    const response = await call('v1/chat/completions', { body, signal });
    let end = null;
    for await (const { data } of eventsOf(response)) {
      if (data === '[DONE]') return end;
      this.#follow(() => {
        end = answer.take(JSON.parse(data)) ?? end;
      });
    }
    throw new Error('The connection broke before the answer was complete.');
  }

  /** Make the answer grow, and keep its end in sight if it was. */
  #follow(grow) {
    const scroller = scrollerOf(byId('log'));
    const isFollowed = isNearEnd(scroller);
    grow();
    if (isFollowed) scroller.scrollTop = scroller.scrollHeight;
  }

  #say(text) {
    byId('chat-status').textContent = text;
  }

  #isBusy(isBusy) {
    const hadFocus = [byId('send'), byId('stop')].includes(document.activeElement);
    byId('send').hidden = isBusy;
    byId('stop').hidden = !isBusy;
    if (hadFocus) byId(isBusy ? 'stop' : 'send').focus();
    byId('retry').disabled = isBusy || !this.#turns.length;
    byId('clear').disabled = !this.#turns.length;
  }
}

/** In a small window it is the page that scrolls, not the conversation in it. */
function scrollerOf(log) {
  return getComputedStyle(log).overflowY === 'auto' ? log : document.scrollingElement;
}

function isNearEnd(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 60;
}
