// What the parts of the page share: elements, numbers as text, canvases, the tooltip.

export const byId = (id) => document.getElementById(id);

/** Makes an element. Text is never taken for HTML: clients choose request ids. */
export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Makes an entry of a legend: a patch of a colour, and what it stands for. */
export function legendEntry(name, text) {
  const entry = element("li");
  const patch = element("i");
  patch.style.background = colour(name);
  entry.append(patch, text);
  return entry;
}

/** Gives a colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { maximumFractionDigits: digits });

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** Sizes a canvas to its place on the page, in the screen's own pixels; gives what draws on it. */
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

/** Shows what `describe` says of a place on a canvas, while the pointer is there. */
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

/** Says anew what is under the pointer, which may have changed without its moving. */
export const refreshTooltip = () => explainAgain();
