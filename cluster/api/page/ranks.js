// Which processes there are: of each group its ranks, where they run, and how far they are.

import { call } from './server.js';
import { mebibytes } from './figures.js';

const EVERY_MS = 2000;

export class RankTable {
  #body;
  #timer = 0;
  #isShown = false;

  constructor(body) {
    this.#body = body;
    document.addEventListener('visibilitychange', () => this.show(this.#isShown));
  }

  /** Ask while somebody looks, and only then. */
  show(isShown) {
    this.#isShown = isShown;
    clearTimeout(this.#timer);
    if (isShown && document.visibilityState === 'visible') void this.#ask();
  }

  async #ask() {
    try {
      this.#fill(await (await call('admin/status')).json());
    } catch {
      // the state in the bar says what is in the way
    }
    clearTimeout(this.#timer);
    if (this.#isShown) this.#timer = setTimeout(() => void this.#ask(), EVERY_MS);
  }

  #fill(status) {
    const rows = (status.groups ?? []).flatMap(rowsOf);
    while (this.#body.rows.length > rows.length) this.#body.deleteRow(-1);
    while (this.#body.rows.length < rows.length) {
      const row = this.#body.insertRow();
      for (let i = 0; i < 10; i += 1) row.insertCell();
    }
    rows.forEach((texts, i) => {
      texts.forEach((text, column) => {
        const cell = this.#body.rows[i].cells[column];
        if (cell.textContent !== text) cell.textContent = text;
      });
    });
  }
}

function rowsOf(group) {
  const ranks = group.ranks ?? [];
  if (!ranks.length) return [rowOf(group, null)];
  return ranks.map((rank) => rowOf(group, rank));
}

function rowOf(group, rank) {
  const name = rank ? `${group.group}.${rank.rank}` : String(group.group);
  const state = group.message ? `${group.state}: ${group.message}` : group.state;
  const restarts = String(group.num_restarts ?? 0);
  if (!rank) return [name, String(group.epoch), restarts, state, '–', '–', '–', '–', '–', '–'];
  return [
    name,
    String(group.epoch),
    restarts,
    state,
    rank.state,
    String(rank.stage ?? 0),
    rank.host || '–',
    rank.pid ? String(rank.pid) : '–',
    rank.device || '–',
    rank.weight_bytes ? mebibytes(rank.weight_bytes) : '–',
  ];
}
