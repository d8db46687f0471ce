// The live view: figures, the last steps as columns, charts over time, and the worker groups.

import { WHOLE, color, timeChart } from './charts.js';
import { StepScope } from './scope.js';
import { compact, percent, seconds } from './figures.js';
import { WINDOW_S } from './history.js';
import { RankTable } from './ranks.js';

const FRAME_MS = 100;
const CALM_FRAME_MS = 1000; // for those who want less motion

const byId = (id) => document.getElementById(id);

export class LiveView {
  #past;
  #scope = null;
  #charts = [];
  #timer = 0;
  #isShown = false;
  #isPaused = false;
  #group = null;
  #ranks = new RankTable(byId('ranks'));

  constructor(past) {
    this.#past = past;
    byId('pause').addEventListener('click', () => this.#pause(!this.#isPaused));
    byId('group').addEventListener('change', (event) => {
      this.#group = event.target.value === '' ? null : Number(event.target.value);
      this.#draw();
    });
    const calm = matchMedia('(prefers-reduced-motion: reduce)');
    calm.addEventListener('change', () => this.#run());
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#draw());
  }

  show(isShown) {
    this.#isShown = isShown;
    this.#ranks.show(isShown);
    if (isShown && !this.#scope) this.#build();
    this.#run();
  }

  engineIs(state) {
    const text = state === 'ready' ? '' : `The engine: ${state}.`;
    if (byId('live-status').textContent !== text) byId('live-status').textContent = text;
  }

  #pause(isPaused) {
    this.#isPaused = isPaused;
    byId('pause').setAttribute('aria-pressed', String(isPaused));
    byId('pause').textContent = isPaused ? 'Go on' : 'Pause';
    this.#run();
  }

  #run() {
    clearInterval(this.#timer);
    if (!this.#isShown) return;
    this.#draw();
    if (this.#isPaused) return;
    const isCalm = matchMedia('(prefers-reduced-motion: reduce)').matches;
    this.#timer = setInterval(
      () => requestAnimationFrame(() => this.#draw()),
      isCalm ? CALM_FRAME_MS : FRAME_MS,
    );
  }

  #build() {
    this.#scope = new StepScope();
    const chart = (id, names, options) => {
      const place = byId(id);
      const keys = place.parentElement.querySelectorAll('.key');
      this.#charts.push({ plot: timeChart(place, { windowS: WINDOW_S, ...options }), names, keys, ...options });
    };
    chart('chart-rate', ['output', 'prompt'], {
      format: compact,
      least: 10,
      series: [{ color: 'decode', fill: true }, { color: 'prefill', isRight: true }],
    });
    chart('chart-requests', ['running', 'waiting'], {
      format: compact,
      incrs: WHOLE,
      least: 4,
      series: [
        { color: 'decode', fill: true, steps: true },
        { color: 'waiting', steps: true },
      ],
    });
    chart('chart-blocks', ['used', 'cached', 'all'], {
      format: compact,
      incrs: WHOLE,
      least: 1,
      series: [
        { color: 'decode', fill: true, steps: true },
        { color: 'cached-ink', steps: true },
        { color: 'muted', dash: [4, 4] },
      ],
    });
    chart('chart-latency', ['ttft', 'itl'], {
      format: seconds,
      log: [0.001, 1],
      series: [{ color: 'prefill', points: true }, { color: 'decode' }],
    });
  }

  #draw() {
    if (!this.#isShown) return;
    const local = performance.now() / 1000;
    const now = this.#past.figures(local, this.#group);
    this.#offerGroups();
    this.#showFigures(now);
    this.#showGroups(local);
    this.#scope.draw(this.#past.lastSteps(this.#scope.numColumns, this.#group));
    const series = this.#past.series(local, this.#group);
    series.all = series.used.map((used) => (used === null ? null : now.blocks));
    for (const chart of this.#charts) {
      chart.plot.setData([series.ago, ...chart.names.map((name) => series[name])]);
      const at = chart.plot.cursor.idx;
      chart.names.forEach((name, i) => {
        const column = series[name];
        const value = at == null ? column.findLast((other) => other !== null) : column[at];
        say(chart.keys[i], chart.format, value);
      });
    }
  }

  #offerGroups() {
    const choice = byId('group');
    const groups = this.#past.groups.map((load) => load.group);
    byId('group-choice').hidden = groups.length < 2;
    const offered = [...choice.options].slice(1).map((option) => Number(option.value));
    if (offered.join() === groups.join()) return;
    while (choice.options.length > 1) choice.remove(1);
    for (const group of groups) choice.add(new Option(String(group), String(group)));
    if (groups.includes(this.#group)) choice.value = String(this.#group);
    else this.#group = null;
  }

  #showFigures(now) {
    const figures = {
      running: compact(now.running),
      waiting: compact(now.waiting),
      output: compact(now.outputPerS),
      prompt: compact(now.promptPerS),
      steps: compact(now.stepsPerS),
      ttft: seconds(now.ttft),
      ttft95: now.ttft95 === null ? 'median' : `95 %: ${seconds(now.ttft95)}`,
      itl: seconds(now.itl),
      itl95: now.itl95 === null ? 'median' : `95 %: ${seconds(now.itl95)}`,
      kv: now.blocks ? percent(now.used / now.blocks) : '–',
      blocks: now.blocks ? `${now.used} of ${now.blocks} blocks` : '',
    };
    for (const place of byId('tiles').querySelectorAll('[data-figure]')) {
      put(place, figures[place.dataset.figure]);
    }
  }

  #showGroups(local) {
    const body = byId('groups');
    const { groups } = this.#past;
    while (body.rows.length > groups.length) body.deleteRow(-1);
    while (body.rows.length < groups.length) {
      const row = body.insertRow();
      for (let i = 0; i < 8; i += 1) row.insertCell();
    }
    groups.forEach(({ group }, i) => {
      const now = this.#past.figures(local, group);
      const share = (count) => (now.blocks ? count / now.blocks : 0);
      const { cells } = body.rows[i];
      put(cells[0], String(group));
      put(cells[1], String(now.running));
      level(cells[2], share(now.used), 'decode');
      level(cells[3], share(now.cached), 'cached');
      put(cells[4], String(now.blocks));
      put(cells[5], compact(now.outputPerS));
      put(cells[6], compact(now.stepsPerS));
      put(cells[7], seconds(now.stepS));
    });
  }
}

/** Change a text only if it is another, so that nothing is laid out in vain. */
function put(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function say(key, format, value) {
  let place = key.querySelector('b');
  if (!place) {
    place = document.createElement('b');
    key.append(' ', place);
  }
  put(place, value === null || value === undefined ? '' : format(value));
}

/** A share as a bar with its percentage. */
function level(cell, share, name) {
  let bar = cell.querySelector('.level');
  if (!bar) {
    bar = document.createElement('span');
    bar.className = 'level';
    bar.append(document.createElement('i'), document.createElement('span'));
    cell.append(bar);
  }
  bar.firstChild.style.width = `${Math.min(100, share * 100)}%`;
  bar.firstChild.style.background = color(name);
  put(bar.lastChild, percent(share));
}
