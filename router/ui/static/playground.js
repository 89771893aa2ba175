// The page's second tab: streams completions and chats through the OpenAI routes.

import { stream } from "./api.js";
import { byId, element, number } from "./page.js";

const history = []; // the chat's messages: {role, content}
let running = null;

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("cancel").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  history.length = 0;
  byId("messages").replaceChildren();
  byId("usage").textContent = "";
});
byId("route").addEventListener("change", () => {
  byId("system-label").hidden = !isChat();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});

const isChat = () => byId("route").value === "chat";

async function ask() {
  if (running) return;
  running = new AbortController();
  byId("send").disabled = true;
  byId("cancel").disabled = false;
  const prompt = byId("prompt").value;
  const question = say("", prompt);
  const answer = isChat() ? say("answer", "") : question;
  const text = document.createTextNode("");
  if (!isChat()) {
    question.replaceChildren(element("em", prompt));
    question.classList.add("answer");
  }
  answer.append(text);
  const began = performance.now();
  let first = null;
  let usage = null;
  let said = "";
  let frame = null;
  // Lays out the text once in a frame: once for each token would take all of the page's time.
  const show = () => {
    frame = null;
    keepingTheEnd(() => text.data = said);
  };
  try {
    for await (const event of stream(`v1/${isChat() ? "chat/completions" : "completions"}`, body(prompt), running.signal)) {
      const choice = event.choices[0];
      const piece = choice?.text ?? choice?.delta?.content ?? "";
      if (piece) first ??= performance.now();
      said += piece;
      usage = event.usage ?? usage;
      frame ??= requestAnimationFrame(show);
    }
    if (isChat()) history.push({ role: "user", content: prompt }, { role: "assistant", content: said });
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  } finally {
    cancelAnimationFrame(frame);
    show();
    running = null;
    byId("send").disabled = false;
    byId("cancel").disabled = true;
    byId("usage").textContent = summary(usage, began, first);
  }
}

/** Makes the request's body, without most fields that have their default value. */
function body(prompt) {
  const value = (id) => Number(byId(id).value);
  const asked = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: value("max-tokens"),
    temperature: value("temperature"),
    top_p: value("top-p"),
  };
  if (value("top-k")) asked.top_k = value("top-k");
  if (value("min-p")) asked.min_p = value("min-p");
  if (value("repetition-penalty") !== 1) asked.repetition_penalty = value("repetition-penalty");
  if (byId("seed").value !== "") asked.seed = value("seed");
  if (byId("stop-string").value) asked.stop = [byId("stop-string").value];
  if (!isChat()) return { ...asked, prompt };
  const system = byId("system").value;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  return { ...asked, messages: [...messages, { role: "user", content: prompt }] };
}

function summary(usage, began, first) {
  if (!usage || first === null) return "";
  const seconds = (performance.now() - first) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} new; ` +
    `first after ${number(first - began)} ms, then ${number((usage.completion_tokens - 1) / seconds, 1)} tokens/s`;
}

function say(className, text) {
  const message = element("div", text, `message ${className}`);
  const messages = byId("messages");
  messages.append(message);
  messages.scrollTop = messages.scrollHeight;
  return message;
}

/** Makes a change to the messages, and shows their end if it was in sight before. */
function keepingTheEnd(change) {
  const messages = byId("messages");
  const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
  change();
  if (isAtEnd) messages.scrollTop = messages.scrollHeight;
}
