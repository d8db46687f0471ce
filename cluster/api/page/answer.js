// One answer of the model as it grows: its text, piece by piece, when each piece came, and how
// sure the model was. Text goes in as text, never as HTML.

import { TimingStrip } from './strip.js';
import { percent, seconds } from './figures.js';

const ENDS = {
  stop: 'the model ended it',
  length: 'cut at max_tokens or the context',
  stopped: 'stopped by you',
  tool_calls: 'tool call',
};

const make = (tag, className, text = '') => {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
};

export class Answer {
  element = make('article', 'message answer');
  text = '';
  #body = make('div', 'body');
  #readout = make('p', 'readout mono muted');
  #figures = make('p', 'figures mono muted');
  #strip = new TimingStrip((index) => this.#choose(index));
  #pieces = []; // {text, wait, logprobs, span}
  #began = performance.now();
  #last = this.#began;
  #first = null;
  #usage = null;

  constructor(name) {
    this.element.append(make('h3', 'who', name), this.#body);
    this.element.setAttribute('aria-busy', 'true');
    this.element.classList.add('growing');
    this.#body.addEventListener('pointerover', (event) => {
      this.#choose(this.#pieces.findIndex((piece) => piece.span === event.target));
    });
    this.#body.addEventListener('pointerleave', () => this.#choose(-1));
  }

  /** Take in one chunk of the stream. Throws what the server said went wrong. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.#usage = chunk.usage;
    const [choice] = chunk.choices ?? [];
    const text = choice?.delta?.content;
    if (text) this.#grow(text, choice.logprobs?.content ?? []);
    return choice?.finish_reason ?? null;
  }

  #grow(text, logprobs) {
    const now = performance.now();
    if (this.#first === null) {
      this.#first = now;
      this.element.append(this.#strip.element, this.#readout, this.#figures);
    }
    const span = make('span', 'piece', text);
    if (logprobs.length) {
      const least = Math.min(...logprobs.map((entry) => Math.exp(entry.logprob)));
      span.style.setProperty('--doubt', percent(0.6 * (1 - least)).replace(' ', ''));
    }
    this.#pieces.push({ text, wait: (now - this.#last) / 1000, logprobs, span });
    this.#last = now;
    this.text += text;
    this.#body.append(span);
    this.#strip.pieces = this.#pieces.map((piece) => piece.wait);
    this.#summarize('');
  }

  /** The stream is over: `end` is its finish reason, or 'stopped'. */
  finish(end) {
    this.#settle();
    if (this.#first === null) this.#body.append(make('em', 'muted', 'no text'));
    this.#summarize(ENDS[end] ?? end ?? '');
  }

  /** It ended with an error, which is shown below what there is. */
  fail(message) {
    this.#settle();
    const error = make('p', 'error', message);
    error.setAttribute('role', 'alert');
    this.element.append(error);
  }

  #settle() {
    this.element.removeAttribute('aria-busy');
    this.element.classList.remove('growing');
  }

  #summarize(end) {
    const parts = [];
    if (this.#first !== null) {
      parts.push(`first token ${seconds((this.#first - this.#began) / 1000)}`);
      const took = (this.#last - this.#first) / 1000;
      const count = this.#usage?.completion_tokens ?? this.#pieces.length;
      if (took > 0 && count > 1) parts.push(`${((count - 1) / took).toFixed(1)} tokens/s`);
    }
    if (this.#usage) {
      const { prompt_tokens: asked, completion_tokens: got } = this.#usage;
      const cached = this.#usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${got} tokens out`, `${asked} in, ${cached} of them cached`);
    }
    if (end) parts.push(end);
    this.#figures.textContent = parts.join(' · ');
    this.#figures.hidden = !parts.length;
    if (!this.#figures.isConnected && end) this.element.append(this.#figures);
  }

  #choose(index) {
    for (const piece of this.element.querySelectorAll('.chosen')) piece.classList.remove('chosen');
    const piece = this.#pieces[index];
    const words = piece ? this.#inWords(piece, index) : '';
    piece?.span.classList.add('chosen');
    this.#readout.textContent = words;
    this.#strip.choose(piece ? index : -1, words);
  }

  #inWords({ text, wait, logprobs }, index) {
    const parts = [`${index + 1}`, JSON.stringify(text)];
    parts.push(index ? `${seconds(wait)} after the one before` : `${seconds(wait)} to the first`);
    for (const entry of logprobs) {
      const others = (entry.top_logprobs ?? [])
        .filter((other) => other.token !== entry.token)
        .slice(0, 3)
        .map((other) => `${JSON.stringify(other.token)} ${sure(other)}`);
      const own = logprobs.length > 1 ? `${JSON.stringify(entry.token)} ` : '';
      parts.push(`${own}${sure(entry)}${others.length ? `, or ${others.join(', ')}` : ''}`);
    }
    return parts.join(' · ');
  }
}

function sure({ logprob }) {
  const share = Math.exp(logprob);
  return share >= 0.01 ? percent(share) : '< 1 %';
}
