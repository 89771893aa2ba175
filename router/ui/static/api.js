// Calls of the router that serves this page, with the key that the user gave, if any.

const KEY = "quire.key";

/** What the router said of a call that failed; `status` is HTTP's. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Keeps the key for this tab, until it is closed. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Gives the JSON at a path; `parameters` that are undefined are left out. */
export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  const query = given.length ? `?${new URLSearchParams(given)}` : "";
  const response = await fetch(path + query, { headers: authorization() });
  await check(response);
  return response.json();
}

/** Posts a body, and yields each of the server-sent events of the answer, parsed. */
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...authorization(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  await check(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffered += value;
    const events = buffered.split("\n\n");
    buffered = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue; // a comment: there is nothing new yet
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(parsed.error.code, parsed.error.message);
      yield parsed;
    }
  }
}

/** Makes objects of columns, as the router sends what there is much of. */
export function rows(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

/** Gives the numbers of packed int32. */
export function int32s(base64) {
  return new Int32Array(bytes(base64).buffer);
}

/** Gives what is in base64. */
export function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function check(response) {
  if (response.ok) return;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error?.message ?? `the router answers ${response.status}`);
}
