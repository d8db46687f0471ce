// What the engine did lately, from its news: rows of steps, and figures and series made of them.
//
// Times are seconds of the engine's clock, which is followed by ours: news say what it was.

import { quantile } from './figures.js';

export const WINDOW_S = 90; // what the charts over time show
export const BIN_S = 0.5;
const MAX_ROWS = 4000;
const RATE_S = 2; // rates are over this long
const LATENCY_S = 30; // quantiles too

const FLOWS = ['output', 'prompt', 'itl', 'itlWeight'];
const GAUGES = ['running', 'waiting', 'used', 'cached'];
const NOTHING = Object.fromEntries(GAUGES.map((name) => [name, 0]));

export class History {
  rows = []; // one per step, newest last
  groups = []; // how each group is now
  waiting = 0;
  firsts = []; // [time, seconds to the first token]
  #gaps = []; // [time, seconds between tokens, how many sequences, group]
  #last = new Map(); // group -> its newest row
  #bins = new Map(); // group -> bin number -> sums and peaks
  #ahead = null; // the engine's clock less ours
  #since = null; // when we began to watch

  /** One message of the feed; `local` is our clock. */
  take(news, local) {
    const ahead = news.uptime_s - local;
    if (this.#ahead !== null && ahead < this.#ahead - 5) this.#forget(); // another engine
    this.#ahead = Math.max(this.#ahead ?? ahead, ahead);
    this.#since ??= news.uptime_s;
    this.groups = news.groups ?? [];
    this.waiting = news.num_waiting ?? 0;
    for (let i = 0; i < (news.step?.length ?? 0); i += 1) this.#add(rowOf(news, i));
    for (const wait of news.first_token_s ?? []) this.firsts.push([news.uptime_s, wait]);
    for (const load of this.groups) {
      this.#gauge(this.#bin(load.group, news.uptime_s), {
        running: load.num_running ?? 0,
        waiting: this.waiting,
        used: load.num_used_blocks ?? 0,
        cached: load.num_cached_blocks ?? 0,
      });
    }
    this.#prune(news.uptime_s);
  }

  /** The engine's clock when ours is `local`. */
  now(local) {
    return local + (this.#ahead ?? 0);
  }

  #forget() {
    this.rows = [];
    this.firsts = [];
    this.#gaps = [];
    this.#last.clear();
    this.#bins.clear();
    this.#ahead = this.#since = null;
  }

  #add(row) {
    const before = this.#last.get(row.group);
    if (row.decode && before?.step === row.step - 1) {
      row.gap = row.time - before.time;
      this.#gaps.push([row.time, row.gap, row.decode, row.group]);
    }
    this.#last.set(row.group, row);
    this.rows.push(row);
    const bin = this.#bin(row.group, row.time);
    bin.output += row.fresh;
    bin.prompt += row.prefill;
    if (row.gap) {
      bin.itl += row.gap * row.decode;
      bin.itlWeight += row.decode;
    }
    this.#gauge(bin, row);
  }

  #bin(group, time) {
    if (!this.#bins.has(group)) this.#bins.set(group, new Map());
    const bins = this.#bins.get(group);
    const number = Math.floor(time / BIN_S);
    if (!bins.has(number)) {
      const empty = { peak: { ...NOTHING }, end: NOTHING };
      for (const flow of FLOWS) empty[flow] = 0;
      bins.set(number, empty);
    }
    return bins.get(number);
  }

  /** What was at one moment of the bin; the last one said is how it ended. */
  #gauge(bin, values) {
    for (const name of GAUGES) bin.peak[name] = Math.max(bin.peak[name], values[name]);
    bin.end = values;
  }

  #prune(now) {
    if (this.rows.length > MAX_ROWS) this.rows.splice(0, this.rows.length - MAX_ROWS);
    this.firsts = this.firsts.filter(([time]) => time > now - WINDOW_S);
    this.#gaps = this.#gaps.filter(([time]) => time > now - LATENCY_S);
    const oldest = Math.floor((now - WINDOW_S) / BIN_S) - 2;
    for (const bins of this.#bins.values()) {
      const before = newestBefore(bins, oldest); // how things were then, until the next news
      for (const number of bins.keys()) if (number < before) bins.delete(number);
    }
  }

  /** How things are now, of one group or (null) of all. */
  figures(local, group = null) {
    const now = this.now(local);
    const is = (other) => group === null || other === group;
    const loads = this.groups.filter((load) => is(load.group));
    const sum = (field) => loads.reduce((total, load) => total + (load[field] ?? 0), 0);
    let [output, prompt, steps, busy] = [0, 0, 0, 0];
    for (let i = this.rows.length - 1; i >= 0 && this.rows[i].time > now - RATE_S; i -= 1) {
      const row = this.rows[i];
      if (!is(row.group)) continue;
      output += row.fresh;
      prompt += row.prefill;
      steps += 1;
      busy += row.seconds;
    }
    const gaps = this.#gaps.filter((gap) => is(gap[3]) && gap[0] > now - LATENCY_S);
    const itl = gaps.map(([, gap, weight]) => [gap, weight]);
    const ttft = this.firsts.filter(([time]) => time > now - LATENCY_S).map(([, s]) => [s, 1]);
    return {
      running: sum('num_running'),
      waiting: this.waiting,
      blocks: sum('num_blocks'),
      used: sum('num_used_blocks'),
      cached: sum('num_cached_blocks'),
      outputPerS: output / RATE_S,
      promptPerS: prompt / RATE_S,
      stepsPerS: steps / RATE_S,
      stepS: steps ? busy / steps : null,
      itl: quantile(itl, 0.5),
      itl95: quantile(itl, 0.95),
      ttft: quantile(ttft, 0.5),
      ttft95: quantile(ttft, 0.95),
    };
  }

  /** The last `count` steps of one group, or of all. */
  lastSteps(count, group = null) {
    const found = [];
    for (let i = this.rows.length - 1; i >= 0 && found.length < count; i -= 1) {
      if (group === null || this.rows[i].group === group) found.push(this.rows[i]);
    }
    return found.reverse();
  }

  /** Columns over the last `WINDOW_S`, `ago` in seconds before now; gauges hold their value
   *  while there is no news. */
  series(local, group = null) {
    const now = this.now(local);
    const last = Math.floor(now / BIN_S) - 1; // the newest bin is not full yet
    const first = last - WINDOW_S / BIN_S;
    const of = (make) => Array.from({ length: last - first + 1 }, make);
    const out = { ago: of((_, i) => (first + i + 1) * BIN_S - now) };
    for (const name of ['output', 'prompt', 'running', 'waiting', 'used', 'cached']) {
      out[name] = of(() => 0);
    }
    const [itl, weight] = [of(() => 0), of(() => 0)];
    for (const [number, bins] of this.#bins) {
      if (group !== null && number !== group) continue;
      let held = bins.get(newestBefore(bins, first))?.end ?? NOTHING;
      for (let i = 0; i < out.ago.length; i += 1) {
        const bin = bins.get(first + i);
        const gauges = bin?.peak ?? held;
        if (bin) {
          held = bin.end;
          out.output[i] += bin.output / BIN_S;
          out.prompt[i] += bin.prompt / BIN_S;
          itl[i] += bin.itl;
          weight[i] += bin.itlWeight;
        }
        out.running[i] += gauges.running;
        out.used[i] += gauges.used;
        out.cached[i] += gauges.cached;
        out.waiting[i] = Math.max(out.waiting[i], gauges.waiting);
      }
    }
    const unseen = Math.ceil((this.#since ?? now) / BIN_S) - first - 1;
    for (const column of [out.output, out.prompt, out.running, out.waiting, out.used, out.cached]) {
      column.fill(null, 0, Math.max(0, unseen)); // we did not watch then
    }
    const lately = (column, i) => column[i] + (column[i - 1] ?? 0) + (column[i - 2] ?? 0);
    out.itl = of((_, i) => (lately(weight, i) ? lately(itl, i) / lately(weight, i) : null));
    out.ttft = of(() => null);
    for (const [time, wait] of this.firsts) {
      const i = Math.floor(time / BIN_S) - first;
      if (i >= 0 && i < out.ttft.length) out.ttft[i] = Math.max(out.ttft[i] ?? 0, wait);
    }
    return out;
  }
}

/** The newest bin whose number is below `number`; -Infinity if there is none. */
function newestBefore(bins, number) {
  return Math.max(-Infinity, ...[...bins.keys()].filter((other) => other < number));
}

function rowOf(news, i) {
  const at = (column) => news[column]?.[i] ?? 0;
  return {
    time: news.uptime_s - at('age_s'),
    group: at('group'),
    step: at('step'),
    prefill: at('prefill_tokens'),
    decode: at('decode_tokens'),
    hits: at('cached_tokens'),
    fresh: at('new_tokens'),
    preempted: at('preempted'),
    running: at('running'),
    waiting: at('waiting'),
    used: at('used_blocks'),
    cached: at('cached_blocks'),
    seconds: at('compute_s'),
    gap: 0,
  };
}
