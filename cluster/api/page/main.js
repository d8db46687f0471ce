// The page: which view is shown, the key, the model's name, and the engine's state in the bar.

import { Playground } from './playground.js';
import { LiveView } from './live.js';
import { StepFeed } from './feed.js';
import { History } from './history.js';
import { call, saveKey, savedKey } from './server.js';
import { compact, percent } from './figures.js';

const byId = (id) => document.getElementById(id);

const past = new History();
const playground = new Playground(askForKey);
const live = new LiveView(past);
const feed = new StepFeed({
  onNews: (news) => past.take(news, performance.now() / 1000),
  onState: showState,
  onRefused: askForKey,
});

function showView() {
  const wanted = location.hash === '#live' ? 'live' : 'playground';
  for (const view of document.querySelectorAll('main > .view')) view.hidden = view.id !== wanted;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.dataset.view === wanted) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  document.title = wanted === 'live' ? 'Stoker · live' : 'Stoker · playground';
  live.show(wanted === 'live');
}

/** The server refused our key, or wants one: ask for it. */
function askForKey(message) {
  byId('key-form').hidden = false;
  byId('key-error').textContent = savedKey() ? message : '';
  byId('key').focus();
}

byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  saveKey(byId('key').value.trim());
  byId('key').value = '';
  byId('key-form').hidden = true;
  feed.restart();
  void learnModel();
  byId('prompt').focus();
});

async function learnModel() {
  try {
    const answer = await (await call('v1/models')).json();
    const model = answer.data[0];
    byId('model').textContent = shortName(model.id);
    byId('model').title = model.id;
    playground.use(model, shortName(model.id));
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else setTimeout(learnModel, 2000); // it starts, or restarts
  }
}

/** A model that was given as a folder has its whole path for a name. */
function shortName(id) {
  return id.startsWith('/') ? id.split('/').pop() : id;
}

let state = 'connecting';

/** `state` is ready, or what is in the way in words. */
function showState(now) {
  if (state !== 'ready' && now === 'ready') void learnModel();
  state = now;
  live.engineIs(now);
  tick();
}

function tick() {
  const isReady = state === 'ready';
  byId('ticker').dataset.state = isReady ? 'ready' : 'unknown';
  let text = state;
  if (isReady) {
    const now = past.figures(performance.now() / 1000);
    text = `${now.running} running · ${now.waiting} waiting · ${compact(now.outputPerS)} tok/s`;
    if (now.blocks) text += ` · KV ${percent(now.used / now.blocks)}`;
  }
  if (byId('ticker-text').textContent !== text) byId('ticker-text').textContent = text;
}

setInterval(tick, 250);
window.addEventListener('hashchange', showView);
document.addEventListener('visibilitychange', () => {
  if (document.hidden) feed.stop();
  else feed.restart();
});

showView();
feed.restart();
