// The last 30 seconds of a worker's steps: duration, tokens and queues.

import { rows } from "./api.js";
import { byId, colour, explain, legendEntry, number, prepare } from "./page.js";

const WINDOW_S = 30;
const HEIGHT = 200;
const LANES = { time: [14, 62], tokens: [82, 132], queue: [152, 196] }; // top and bottom

const canvas = byId("timeline");
let steps = [];
let now = 0;

for (const [name, text] of [
  ["prefill", "step with prefill, its tokens"],
  ["decode", "decode only, its tokens"],
  ["running", "running"],
  ["waiting", "waiting"],
  ["bad", "▲ preemption"],
  ["shared", "▼ swap"],
]) byId("timeline-legend").append(legendEntry(name, text));
explain(canvas, describe);

/** Removes all steps, because another worker is shown or the worker was attached again. */
export function clearSteps() {
  steps = [];
  show();
}

/** Returns the id of the last known step; 0: none. */
export const lastStepId = () => (steps.length ? steps[steps.length - 1].step_id : 0);

/** Adds new steps, which come as columns; drops those before the window, and draws the rest. */
export function showSteps(columns) {
  steps.push(...rows(columns));
  // The time is the service's, whose clock may differ from this machine's. It stands still while no
  // step runs.
  if (steps.length) now = steps[steps.length - 1].answered_at_s;
  steps = steps.filter((step) => step.answered_at_s > now - WINDOW_S);
  show();
}

function show() {
  byId("rates").textContent = rates();
  draw();
}

function rates() {
  const recent = steps.filter((step) => step.answered_at_s > now - 5);
  if (recent.length < 2) return "";
  const took = now - recent[0].answered_at_s || 1;
  const sum = (name) => recent.slice(1).reduce((total, step) => total + step[name], 0);
  return `${number((recent.length - 1) / took, 1)} steps/s, ` +
    `${number(sum("num_prefill_tokens") / took)} prompt and ${number(sum("num_decode_tokens") / took)} decoded tokens/s, ` +
    `busy ${number((100 * sum("execute_s")) / took)} %`;
}

function draw() {
  const { context, width } = prepare(canvas, HEIGHT);
  const x = (step) => width - ((now - step.answered_at_s) / WINDOW_S) * width;
  const most = (of) => Math.max(1e-9, ...steps.map(of));
  const scale = ([top, bottom], value, max) => bottom - ((bottom - top) * value) / max;
  context.font = "11px system-ui, sans-serif";
  const longest = most((step) => step.execute_s);
  const largest = most((step) => step.num_prefill_tokens + step.num_decode_tokens);
  const queued = most((step) => Math.max(step.num_running, step.num_waiting));
  label(context, LANES.time, `step, up to ${number(longest * 1000, 1)} ms`, width);
  label(context, LANES.tokens, `tokens of a step, up to ${number(largest)}`, width);
  label(context, LANES.queue, `sequences, up to ${number(queued)}`, width);
  if (!steps.length) return;
  const bar = Math.max(1, Math.min(6, (width / steps.length) * 0.7));
  for (const step of steps) {
    const left = x(step) - bar;
    const rect = (lane, from, to, max, name) => {
      context.fillStyle = colours[name];
      const top = scale(lane, to, max);
      context.fillRect(left, top, bar, scale(lane, from, max) - top);
    };
    const { num_decode_tokens: decoded, num_prefill_tokens: prefilled } = step;
    rect(LANES.time, 0, step.execute_s, longest, prefilled ? "prefill" : "decode");
    rect(LANES.tokens, 0, decoded, largest, "decode");
    rect(LANES.tokens, decoded, decoded + prefilled, largest, "prefill");
    context.textAlign = "center";
    if (step.num_preemptions) mark(context, "▲", "bad", x(step), LANES.time[0] - 3);
    if (step.num_swapped_out_blocks || step.num_swapped_in_blocks) {
      mark(context, "▼", "shared", x(step), LANES.tokens[0] - 3);
    }
  }
  for (const name of ["running", "waiting"]) {
    context.strokeStyle = colours[name];
    context.lineWidth = 1.5;
    context.beginPath();
    for (const step of steps) context.lineTo(x(step), scale(LANES.queue, step[`num_${name}`], queued));
    context.stroke();
  }
}

// Caches the colours, which each drawing needs thousands of times.
const colours = new Proxy({}, {
  get(known, name) {
    if (!(name in known)) known[name] = colour(name);
    return known[name];
  },
});

function mark(context, sign, name, x, y) {
  context.fillStyle = colours[name];
  context.fillText(sign, x, y);
}

function label(context, [top, bottom], text, width) {
  context.textAlign = "left";
  context.fillStyle = colours.faint;
  context.fillText(text, 0, top - 4);
  context.fillStyle = colours.line;
  context.fillRect(0, bottom, width, 1);
}

/** Describes the step nearest to a position. */
function describe(x) {
  if (x < 0 || !steps.length) return "";
  const at = now - (1 - x / canvas.clientWidth) * WINDOW_S;
  const distance = (step) => Math.abs(step.answered_at_s - at);
  const step = steps.reduce((nearest, each) => (distance(each) < distance(nearest) ? each : nearest));
  return `step ${step.step_id}: ${number(step.execute_s * 1000, 2)} ms at the worker, ${number(step.rpc_s * 1000, 2)} ms in flight\n` +
    `${step.num_prefill_tokens} prompt tokens, ${step.num_decode_tokens} decoded\n` +
    `${step.num_running} running, ${step.num_waiting} waiting, ${step.num_preemptions} preempted\n` +
    `${step.num_swapped_out_blocks} blocks swapped out, ${step.num_swapped_in_blocks} in`;
}
