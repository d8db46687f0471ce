// The step scope: the last steps side by side, one column each, in three lanes. One step can be
// pointed at, or walked to with the arrow keys, and is then told in words.

import { WHOLE, color, stepLane } from './charts.js';
import { compact, seconds } from './figures.js';

const COLUMN_PX = 6;
const HINT = 'Point at a step, or focus the chart and use the arrow keys.';

const byId = (id) => document.getElementById(id);

export class StepScope {
  #rows = [];
  #first = 0; // which column the oldest row has, counted from the left
  #chosen = null; // a row
  #lanes;
  #place = byId('scope');

  constructor() {
    const lane = (id, options) =>
      stepLane(byId(id), { marks: (plot) => this.#mark(plot, id), ...options });
    this.#lanes = [
      lane('lane-decode', { height: 104, series: ['decode'], format: compact, incrs: WHOLE, least: 4 }),
      lane('lane-prefill', {
        height: 104,
        series: ['cached', 'prefill'],
        format: compact,
        incrs: WHOLE,
        least: 16,
      }),
      lane('lane-time', {
        height: 92,
        series: ['time'],
        format: seconds,
        least: 0.005,
        hasAxis: (_, splits) => splits.map((column) => this.#age(this.#rowAt(column))),
      }),
    ];
    this.#place.addEventListener('pointermove', (event) => this.#pointAt(event));
    this.#place.addEventListener('pointerdown', (event) => this.#pointAt(event));
    this.#place.addEventListener('pointerleave', () => this.#choose(null));
    this.#place.addEventListener('blur', () => this.#choose(null));
    this.#place.addEventListener('keydown', (event) => this.#walk(event));
  }

  get numColumns() {
    const width = this.#lanes[0].over.clientWidth || this.#place.clientWidth;
    return Math.max(30, Math.min(300, Math.floor(width / COLUMN_PX)));
  }

  draw(rows) {
    this.#rows = rows;
    const count = this.numColumns;
    this.#first = count - rows.length;
    byId('scope-empty').hidden = rows.length > 0;
    const columns = Array.from({ length: count }, (_, i) => i);
    const of = (value) => columns.map((i) => {
      const row = rows[i - this.#first];
      return row ? value(row) || null : null;
    });
    const [decode, prefill, time] = this.#lanes;
    decode.setData([columns, of((row) => row.decode)]);
    prefill.setData([
      columns,
      of((row) => row.hits && row.prefill + row.hits),
      of((row) => row.prefill),
    ]);
    time.batch(() => {
      time.setData([columns, of((row) => row.seconds)]);
      time.redraw(false, true); // the labels move though the columns do not
    });
    this.#tell();
  }

  #rowAt(column) {
    return this.#rows[column - this.#first];
  }

  /** How long before the newest step it was. */
  #age(row) {
    return row ? `-${(this.#rows.at(-1).time - row.time).toFixed(1)} s` : '';
  }

  #choose(row) {
    this.#chosen = row ?? null;
    for (const lane of this.#lanes) lane.redraw(false);
    this.#tell();
  }

  #pointAt(event) {
    const { over } = this.#lanes[0];
    const left = event.clientX - over.getBoundingClientRect().left;
    this.#choose(this.#rowAt(Math.floor((left / over.clientWidth) * this.numColumns)));
  }

  #walk(event) {
    const last = this.#rows.length - 1;
    // A step that has left the chart at its old end is walked on from there.
    const at = this.#chosen ? Math.max(0, this.#rows.indexOf(this.#chosen)) : last + 1;
    const target = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageUp: at + 10,
      PageDown: at - 10,
      Home: 0,
      End: last,
    }[event.key];
    if (target === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(this.#rows[Math.max(0, Math.min(last, target))]);
  }

  #tell() {
    const row = this.#chosen;
    const text = row ? inWords(row) : HINT;
    const readout = byId('scope-readout');
    if (readout.textContent !== text) readout.textContent = text;
    readout.classList.toggle('muted', !row);
    const last = Math.max(0, this.#rows.length - 1);
    this.#place.setAttribute('aria-valuemax', String(last));
    this.#place.setAttribute('aria-valuenow', String(row ? Math.max(0, this.#rows.indexOf(row)) : last));
    // What changes ten times a second is not read out unless it was asked for.
    this.#place.setAttribute('aria-valuetext', row ? text : 'the newest step');
  }

  /** Behind the columns: the chosen step, and steps that took blocks from somebody. */
  #mark(plot, id) {
    const { ctx, bbox } = plot;
    const width = bbox.width / this.numColumns;
    const left = (i) => bbox.left + (i + this.#first) * width;
    ctx.save();
    const chosen = this.#rows.indexOf(this.#chosen);
    if (chosen >= 0) {
      ctx.fillStyle = color('chosen');
      ctx.fillRect(left(chosen), bbox.top, width, bbox.height);
    }
    ctx.fillStyle = color('bad');
    const preempted = id === 'lane-decode' ? this.#rows : [];
    preempted.forEach((row, i) => {
      if (row.preempted) ctx.fillRect(left(i), bbox.top, Math.max(2, width - 1), bbox.height / 24);
    });
    ctx.restore();
  }
}

function inWords(row) {
  const parts = [
    `step ${row.step}`,
    `group ${row.group}`,
    `${row.decode} decode`,
    `${row.prefill} prefill`,
  ];
  if (row.hits) parts.push(`${row.hits} from the cache`);
  if (row.preempted) parts.push(`${row.preempted} preempted`);
  parts.push(
    `${row.running} running`,
    `${row.waiting} waiting`,
    `${row.used} blocks in use`,
    seconds(row.seconds),
  );
  return parts.join(' · ');
}
