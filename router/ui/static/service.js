// The page's first tab: shows the state of the service, which it reads twice a second.

import { ApiError, get, rows } from "./api.js";
import { highlight, showBlocks } from "./blocks.js";
import { byId, element, number, refreshTooltip, share } from "./page.js";
import { clearSteps, lastStepId, showSteps } from "./timeline.js";

const MAX_PAGES = 4; // enough for 262,144 blocks and 4,096 sequences
const COLUMNS = [
  "seq_id", "request_id", "output_index", "status", "num_tokens", "num_prompt_tokens",
  "num_computed_tokens", "num_cached_tokens", "num_device_blocks", "num_host_blocks",
  "num_disk_blocks", "num_shared_blocks",
];

let attachedAt = 0;
let chosen = ""; // the shown worker; it may be disconnected for a while

byId("worker").addEventListener("change", () => {
  chosen = byId("worker").value;
  clearSteps();
});
byId("sequences").addEventListener("pointerover", (event) => {
  const row = event.target.closest("tr");
  highlight(row ? Number(row.dataset.seq) : null);
});
byId("sequences").addEventListener("pointerleave", () => highlight(null));

/** Shows one frame. */
export async function showService() {
  showLoad(await get("ui/api/load"));
  try {
    note(...(await showWorkers()));
  } catch (error) {
    // A tenant may not see other tenants' blocks, but may see everything else.
    if (!(error instanceof ApiError) || error.status !== 403) throw error;
    note(error.message, "bad");
  }
}

function note(text, className = "") {
  byId("map-note").textContent = text;
  byId("map-note").className = className;
  byId("map-note").hidden = !text;
}

/** Shows the chosen worker; returns a note about it and the note's style. */
async function showWorkers() {
  const { workers } = await get("ui/api/activity", { max_steps: 0 });
  chosen ||= workers[0]?.worker ?? "";
  const found = workers.find((each) => each.worker === chosen);
  offer(found || !chosen ? workers : [...workers, { worker: chosen, is_lost: true }]);
  if (found && !found.is_unloaded) {
    await Promise.all([showActivity(chosen), showKv(chosen)]);
  } else {
    showNothing();
  }
  refreshTooltip();
  if (found?.is_unloaded) return ["This worker's model is unloaded, so its device is free. “quire load” loads the model again."];
  return found || !chosen ? [""] : ["The scheduler has no connection to this worker.", "bad"];
}

/** Lists the workers by name, so that their order does not depend on their state. */
function offer(workers) {
  const select = byId("worker");
  const label = ({ worker, is_unloaded, is_lost }) =>
    shortened(worker) + (is_unloaded ? " (unloaded)" : is_lost ? " (not attached)" : "");
  const options = workers.map((each) => new Option(label(each), each.worker));
  options.sort((a, b) => a.value.localeCompare(b.value, "en", { numeric: true }));
  const told = (all) => all.map((option) => option.text + option.value).join();
  if (told(options) !== told([...select.options])) select.replaceChildren(...options);
  select.value = chosen;
}

function showNothing() {
  clearSteps();
  byId("preemptions").textContent = "–";
  showBlocks({ tiers: [], sequences: [] });
  showSequences({ sequences: [], num_sequences: 0 });
}

/** Returns the end of a socket's path, because its beginning is the same for all workers. */
const shortened = (target) => (target.startsWith("unix:") ? target.slice(target.lastIndexOf("/") + 1) : target);

async function showActivity(worker) {
  const { workers: [activity] } = await get("ui/api/activity", {
    worker, max_steps: 1024, after_step_id: lastStepId(),
  });
  if (activity.attached_at_s !== attachedAt) clearSteps(); // some of the new steps are lost, too
  attachedAt = activity.attached_at_s;
  byId("preemptions").textContent = number(activity.num_preemptions);
  if (worker === chosen) showSteps(activity.steps);
}

async function showKv(worker) {
  const { workers: [kv] } = await get("ui/api/kv", { worker, max_sequences: 1024, block_tables: true });
  kv.sequences = rows(kv.sequences);
  for (let page = 1, last = kv; page < MAX_PAGES; page += 1) {
    const next = Math.min(...last.tiers.map((tier) => tier.next_block).filter(Boolean));
    if (!Number.isFinite(next)) break;
    ({ workers: [last] } = await get("ui/api/kv", { worker, first_block: next, max_sequences: 0 }));
    last.tiers.forEach((tier, i) => {
      kv.tiers[i].states = joined(kv.tiers[i].states, tier.states);
      kv.tiers[i].next_block = tier.next_block;
    });
  }
  for (let page = 1; page < MAX_PAGES && kv.next_seq_id; page += 1) {
    const { workers: [more] } = await get("ui/api/kv", {
      worker, first_seq_id: kv.next_seq_id, max_sequences: 1024, max_blocks: 0, block_tables: true,
    });
    kv.sequences.push(...rows(more.sequences));
    kv.next_seq_id = more.next_seq_id;
  }
  if (worker !== chosen) return;
  showBlocks(kv);
  showSequences(kv);
}

const joined = (a, b) => btoa(atob(a) + atob(b));

function showSequences(kv) {
  const shown = kv.sequences.length;
  byId("num-sequences").textContent = shown < kv.num_sequences ? `${shown} of ${kv.num_sequences}` : `${shown}`;
  byId("sequences").replaceChildren(...kv.sequences.map((seq) => {
    const row = element("tr");
    row.dataset.seq = seq.seq_id;
    row.append(...COLUMNS.map((name) => element("td", String(seq[name]))));
    return row;
  }));
}

function showLoad(load) {
  const held = load.num_blocks - load.num_free_blocks - load.num_cached_blocks;
  const figures = {
    running: ["running", `${number(load.num_requests_running)}`, `of ${number(load.max_num_seqs)}`],
    waiting: ["waiting", number(load.num_requests_waiting), `${number(load.num_requests_swapped)} swapped`],
    device: ["device blocks", share(held, load.num_blocks), load.num_blocks ? `held, ${share(load.num_cached_blocks, load.num_blocks)} cached` : "held"],
    hits: ["prefix cache hits", share(load.num_prefix_cache_hits, load.num_prefix_cache_queries), "of tokens"],
    occupancy: ["token occupancy", share(load.num_slots_written, load.num_slots_held), "of slots"],
    fragmentation: ["fragmentation", share(load.fragmentation, 1), `${number(load.num_moved_blocks)} moved`],
    preemptions: ["preemptions", byId("preemptions")?.textContent ?? "–", "of this worker"],
    swaps: ["blocks swapped", number(load.num_swapped_out_blocks), `out, ${number(load.num_swapped_in_blocks)} in`],
  };
  byId("figures").replaceChildren(...Object.entries(figures).map(([id, [title, value, more]]) => {
    const figure = element("div", "", "figure");
    const strong = element("b", value);
    strong.id = id;
    figure.append(element("span", title), strong, element("span", more));
    return figure;
  }));
}
