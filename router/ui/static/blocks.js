// The map of one worker's KV blocks: a grid for each tier, and the holders of the block under the pointer.

import { bytes, int32s } from "./api.js";
import { byId, colour, element, explain, legendEntry, number, prepare } from "./page.js";

const STATES = [, "free", "cached", "pinned", "held", "shared", "retired"]; // by KvBlockState
const MAX_HEIGHT = 180;
const MAX_HOLDERS = 4; // how many to list for a block
const [MIN_CELL, MAX_CELL] = [2, 15];

const views = new Map(); // by tier
let sequences = [];
let blockSize = 0;
let highlighted = null; // a sequence's number

for (const state of STATES.slice(1, -1).reverse()) byId("legend").append(legendEntry(state, state));
byId("legend").lastChild.lastChild.textContent = "free";

/** Shows a worker's answer to `DescribeKv`, which must have block tables. */
export function showBlocks(worker) {
  blockSize = worker.block_size;
  sequences = worker.sequences.map((seq) => ({
    ...seq,
    tables: {
      device: int32s(seq.device_block_ids),
      host: int32s(seq.host_block_ids),
      disk: int32s(seq.disk_block_ids),
    },
  }));
  for (const tier of worker.tiers) {
    if (!views.has(tier.tier)) views.set(tier.tier, makeView(tier.tier));
    const view = views.get(tier.tier);
    view.states = bytes(tier.states);
    const counts = [5, 4, 3, 2, 1].map((s) => `${number(tier[`num_${STATES[s]}`])} ${s === 1 ? "free" : STATES[s]}`);
    const size = (tier.num_blocks * worker.block_bytes) / 2 ** 20;
    const unseen = tier.next_block ? `; shown are the first ${number(view.states.length)}` : "";
    view.title.textContent =
      `${tier.tier}: ${number(tier.num_blocks)} blocks of ${blockSize} tokens, ${number(size)} MiB: ${counts.join(", ")}${unseen}`;
    draw(view);
  }
  for (const [name, view] of views) {
    if (worker.tiers.some((tier) => tier.tier === name)) continue;
    view.root.remove();
    views.delete(name);
  }
}

/** Outlines the blocks of a sequence; null: removes the outline. */
export function highlight(seqId) {
  if (highlighted === seqId) return;
  highlighted = seqId;
  views.forEach(draw);
}

function makeView(tier) {
  const root = element("div", "", "tier");
  const view = { tier, root, title: element("h3"), canvas: element("canvas"), states: [], columns: 1, cell: 1 };
  view.canvas.dataset.tier = tier;
  root.append(view.title, view.canvas);
  byId("tiers").append(root);
  explain(view.canvas, (x, y) => describe(view, x, y));
  return view;
}

function draw(view) {
  const width = view.canvas.clientWidth;
  const count = view.states.length;
  let cell = MAX_CELL;
  while (cell > MIN_CELL && Math.ceil(count / Math.floor(width / cell)) * cell > MAX_HEIGHT) cell -= 1;
  view.cell = cell;
  view.canvas.dataset.cell = cell; // for tests that point at a block
  view.columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(count / view.columns);
  const { context } = prepare(view.canvas, Math.max(cell, rows * cell));
  const size = cell > 3 ? cell - 1 : cell;
  // Draw one colour at a time, because setting it costs more than drawing a rectangle.
  for (let state = 1; state < STATES.length; state += 1) {
    context.fillStyle = colour(STATES[state]);
    for (let block = 0; block < count; block += 1) {
      if (view.states[block] !== state) continue;
      const [x, y] = place(view, block);
      context.fillRect(x, y, size, size);
    }
  }
  const seq = sequences.find((each) => each.seq_id === highlighted);
  if (!seq) return;
  context.strokeStyle = colour("text");
  context.lineWidth = Math.min(2, size / 2);
  for (const block of seq.tables[view.tier]) {
    const [x, y] = place(view, block);
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  }
}

function place(view, block) {
  return [(block % view.columns) * view.cell, Math.floor(block / view.columns) * view.cell];
}

/** Describes the block at a position and its holders. */
function describe(view, x, y) {
  const column = Math.floor(x / view.cell);
  const block = Math.floor(y / view.cell) * view.columns + column;
  if (x < 0 || column >= view.columns || block >= view.states.length) {
    highlight(null);
    return "";
  }
  const holders = sequences
    .map((seq) => ({ seq, at: seq.tables[view.tier].indexOf(block) }))
    .filter(({ at }) => at >= 0);
  highlight(holders.length ? holders[0].seq.seq_id : null);
  const state = STATES[view.states[block]];
  const others = holders.length - MAX_HOLDERS;
  const lines = holders.slice(0, MAX_HOLDERS).map(({ seq, at }) => {
    // The host table of a swapped sequence begins with its first block; the disk table follows it.
    const index = view.tier === "disk" ? seq.tables.host.length + at : at;
    return `request ${seq.request_id}, output ${seq.output_index}, seq ${seq.seq_id} (${seq.status}): ` +
      `table entry ${index}, tokens ${index * blockSize}–${(index + 1) * blockSize - 1}`;
  });
  return [`${view.tier} block ${block}: ${state}`, ...lines, ...(others > 0 ? [`and ${others} more`] : [])].join("\n");
}
