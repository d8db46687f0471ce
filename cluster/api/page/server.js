// Calls to the server this page came from: the key, errors as text, and streams of events.

const KEY = 'stoker-key';

export const savedKey = () => sessionStorage.getItem(KEY) ?? '';
export const saveKey = (key) => sessionStorage.setItem(KEY, key);

/** What went wrong, as a sentence for a person. `status` is 0 when nothing answered. */
export class CallFailed extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Call the server; the answer, if it is a good one.
 *  Throws CallFailed, or an AbortError if `signal` was aborted. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (savedKey()) headers.Authorization = `Bearer ${savedKey()}`;
  if (body) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, {
      method: body ? 'POST' : 'GET',
      headers,
      body: body && JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new CallFailed('The server does not answer. Is it running?');
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

async function failureOf(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of our error bodies: the status says it all
  }
  const wait = response.headers.get('Retry-After');
  if (wait) message += ` (Try again in ${wait} s.)`;
  return new CallFailed(message, response.status);
}

/** The events of a text/event-stream answer, as {event, data}, until it ends. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) {
        const fields = { event: 'message', data: '' };
        for (const line of block.split('\n')) {
          const colon = line.indexOf(':');
          if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 1).trimStart();
        }
        if (fields.data) yield fields;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
