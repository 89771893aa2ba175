// Starts the page: its tabs, the form for the API key, and the loop that updates it.

import { ApiError, get, useKey } from "./api.js";
import { byId } from "./page.js";
import "./playground.js";
import { showService } from "./service.js";

const INTERVAL_MS = 500;
const NAMES_INTERVAL_MS = 4000;
const TABS = ["service", "playground"];

let wake = () => {};
let namedAt = -Infinity;

for (const name of TABS) {
  byId(`tab-${name}`).addEventListener("click", () => {
    for (const each of TABS) {
      byId(each).hidden = each !== name;
      byId(`tab-${each}`).setAttribute("aria-selected", each === name);
    }
    wake();
  });
}
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  wake();
});
document.addEventListener("visibilitychange", () => wake());

async function showFrame() {
  if (performance.now() - namedAt >= NAMES_INTERVAL_MS) await showNames();
  if (!byId("service").hidden) await showService();
}

/** Shows the served models; called repeatedly, because models and adapters may change. */
async function showNames() {
  const { data } = await get("v1/models");
  byId("model").textContent = data.map((model) => model.id).join(", ");
  if (data.length) namedAt = performance.now();
}

async function keepShowing() {
  for (;;) {
    try {
      if (!document.hidden) await showFrame();
      setStatus("live", "");
      byId("key-form").hidden = true;
    } catch (error) {
      namedAt = -Infinity; // ask for the models at once, so that both tabs notice a recovery
      const needsKey = error instanceof ApiError && error.status === 401;
      byId("key-form").hidden = !needsKey;
      setStatus(needsKey ? "needs an API key" : error.message, "bad");
      if (!(error instanceof ApiError || error instanceof TypeError)) throw error; // a bug
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, INTERVAL_MS);
    });
  }
}

function setStatus(text, className) {
  byId("status").textContent = text;
  byId("status").className = className;
}

keepShowing();
