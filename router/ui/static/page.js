// Functions for all parts of the page: elements, number formats, canvases, the tooltip.

export const byId = (id) => document.getElementById(id);

/** Makes an element. Text is never parsed as HTML, because clients choose request ids. */
export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Makes an entry of a legend: a patch of colour and its meaning. */
export function legendEntry(name, text) {
  const entry = element("li");
  const patch = element("i");
  patch.style.background = colour(name);
  entry.append(patch, text);
  return entry;
}

/** Returns a colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { maximumFractionDigits: digits });

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** Sizes a canvas to its place on the page, in device pixels; returns its drawing context. */
export function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

let explainAgain = () => {};

/** While the pointer is on a canvas, shows the text that `describe` returns for its position. */
export function explain(canvas, describe) {
  const tooltip = byId("tooltip");
  canvas.addEventListener("pointermove", (event) => {
    explainAgain = () => {
      const text = describe(event.offsetX, event.offsetY);
      tooltip.hidden = !text;
      tooltip.textContent = text;
      const left = Math.min(event.clientX + 14, window.innerWidth - tooltip.offsetWidth - 8);
      const below = event.clientY + 18;
      const fits = below + tooltip.offsetHeight < window.innerHeight;
      tooltip.style.left = `${Math.max(8, left)}px`;
      tooltip.style.top = `${fits ? below : event.clientY - tooltip.offsetHeight - 10}px`;
    };
    explainAgain();
  });
  canvas.addEventListener("pointerleave", () => {
    explainAgain = () => {};
    tooltip.hidden = true;
    describe(-1, -1);
  });
}

/** Updates the tooltip, because what is under a resting pointer may have changed. */
export const refreshTooltip = () => explainAgain();
