// Calls the router that serves this page, with the user's API key, if any.

const KEY = "quire.key";

/** The router's error for a failed call; `status` is the HTTP status. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Stores the key until this tab is closed. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Returns the JSON at a path; leaves out `parameters` that are undefined. */
export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  const query = given.length ? `?${new URLSearchParams(given)}` : "";
  const response = await fetch(path + query, { headers: authorization() });
  await check(response);
  return response.json();
}

/** Posts a body and yields the parsed server-sent events of the answer. */
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
      if (event.startsWith(":")) continue; // a comment that keeps the connection open
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(parsed.error.code, parsed.error.message);
      yield parsed;
    }
  }
}

/** Converts columns, which the router sends for long lists, to an array of objects. */
export function rows(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

/** Decodes Base64 of packed int32 to numbers. */
export function int32s(base64) {
  return new Int32Array(bytes(base64).buffer);
}

/** Decodes Base64 to bytes. */
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
  throw new ApiError(response.status, body.error?.message ?? `the router answered ${response.status}`);
}
