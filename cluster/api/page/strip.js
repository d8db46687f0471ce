// The timing strip of one answer: a bar for each piece that arrived, as high as the wait for it.

import { color } from './charts.js';
import { quantile, seconds } from './figures.js';

const HEIGHT_PX = 44;
const MAX_BAR_PX = 10;
const LABEL_PX = 46; // as wide as the axis of the charts

export class TimingStrip {
  element = document.createElement('div');
  #canvas = document.createElement('canvas');
  #pieces = [];
  #chosen = -1;
  #onChoose;
  #isDrawDue = false;

  /** onChoose(index): a piece is pointed at; -1: none is any more. */
  constructor(onChoose) {
    this.#onChoose = onChoose;
    const { element } = this;
    element.className = 'strip';
    element.tabIndex = 0;
    element.setAttribute('role', 'slider');
    element.setAttribute('aria-label', 'Timing of each piece of the answer');
    element.setAttribute('aria-valuemin', '1');
    element.append(this.#canvas);
    element.addEventListener('pointermove', (event) => this.#pointAt(event));
    element.addEventListener('pointerdown', (event) => this.#pointAt(event));
    element.addEventListener('pointerleave', () => this.#onChoose(-1));
    element.addEventListener('blur', () => this.#onChoose(-1));
    element.addEventListener('keydown', (event) => this.#walk(event));
    new ResizeObserver(() => this.#drawSoon()).observe(element);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#drawSoon());
    this.choose(-1, '');
  }

  /** The wait for each piece so far, in seconds; the first is the wait for the first token. */
  set pieces(waits) {
    this.#pieces = waits;
    this.element.setAttribute('aria-valuemax', String(Math.max(1, waits.length)));
    this.#drawSoon();
  }

  /** Mark one piece, which `words` describe. */
  choose(index, words) {
    this.#chosen = index;
    const shown = index < 0 ? Math.max(1, this.#pieces.length) : index + 1;
    this.element.setAttribute('aria-valuenow', String(shown));
    this.element.setAttribute('aria-valuetext', words || 'the whole answer');
    this.#drawSoon();
  }

  #pointAt(event) {
    const left = event.clientX - this.#canvas.getBoundingClientRect().left - LABEL_PX;
    const index = Math.floor(left / this.#barPx);
    this.#onChoose(index >= 0 && index < this.#pieces.length ? index : -1);
  }

  #walk(event) {
    const last = this.#pieces.length - 1;
    const at = this.#chosen < 0 ? last + 1 : this.#chosen;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 };
    const target = { Home: 0, End: last }[event.key] ?? at + steps[event.key];
    if (Number.isNaN(target) || last < 0) return;
    event.preventDefault();
    this.#onChoose(Math.max(0, Math.min(last, target)));
  }

  get #barPx() {
    const room = this.element.clientWidth - LABEL_PX;
    return Math.min(MAX_BAR_PX, room / Math.max(1, this.#pieces.length));
  }

  #drawSoon() {
    if (this.#isDrawDue) return;
    this.#isDrawDue = true;
    requestAnimationFrame(() => {
      this.#isDrawDue = false;
      this.#draw();
    });
  }

  #draw() {
    const [canvas, ratio] = [this.#canvas, devicePixelRatio];
    const width = this.element.clientWidth;
    canvas.width = width * ratio;
    canvas.height = HEIGHT_PX * ratio;
    const ctx = canvas.getContext('2d');
    ctx.scale(ratio, ratio);
    const top = this.#highest();
    this.#drawAxis(ctx, width, top);
    const bar = this.#barPx;
    this.#pieces.forEach((wait, i) => {
      const height = Math.max(1, Math.min(1, wait / top) * (HEIGHT_PX - 2));
      const left = LABEL_PX + i * bar;
      if (i === this.#chosen) {
        ctx.fillStyle = color('chosen');
        ctx.fillRect(left, 0, Math.max(bar, 2), HEIGHT_PX);
      }
      ctx.fillStyle = color(i === 0 ? 'prefill' : 'decode');
      ctx.fillRect(left, HEIGHT_PX - height, Math.max(0.75, bar > 3 ? bar - 1 : bar), height);
      if (wait > top && i > 0) {
        ctx.fillStyle = color('bad');
        ctx.fillRect(left, 0, Math.max(1, bar - 1), 2);
      }
    });
  }

  /** What the height stands for: most waits fit; the few that do not are capped in red. */
  #highest() {
    const gaps = this.#pieces.slice(1).map((wait) => [wait, 1]);
    return Math.max(0.005, 1.6 * (quantile(gaps, 0.9) ?? this.#pieces[0] ?? 0));
  }

  #drawAxis(ctx, width, top) {
    ctx.fillStyle = color('muted');
    ctx.font = '10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace';
    ctx.textAlign = 'right';
    ctx.textBaseline = 'top';
    ctx.fillText(seconds(top), LABEL_PX - 6, 1);
    ctx.textBaseline = 'bottom';
    ctx.fillText('0', LABEL_PX - 6, HEIGHT_PX);
    ctx.fillStyle = color('grid');
    ctx.fillRect(LABEL_PX, 0, width - LABEL_PX, 1);
    ctx.fillRect(LABEL_PX, HEIGHT_PX - 1, width - LABEL_PX, 1);
  }
}
