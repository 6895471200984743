// The chat page: from what is typed to what is shown.

import { getJson, streamChat } from "./api.js";
import { addChunk, newAnswer, requestMessages, statistics, userMessage } from "./conversation.js";
import { button, make } from "./dom.js";
import { openImages } from "./images.js";
import { openSettings, readSettings, requestFields, showModels } from "./settings.js";
import { answerView, userView } from "./view.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "Tell me a short story about a lighthouse keeper.",
  "What is a lighthouse?",
  "Describe a walk through a town in the rain.",
];

let messages = []; // of the conversation: user messages, answers, tool results
let views = new Map(); // message -> its view
let running = null; // {answer, controller} while an answer streams
let editing = null; // the user message that is being edited

// Asking ------------------------------------------------------------------------------------------------------------

async function ask() {
  const settings = readSettings();
  const answer = newAnswer();
  const controller = new AbortController();
  let body = null;
  try {
    body = { ...requestFields(settings), messages: requestMessages(messages, settings.system) };
  } catch (error) {
    answer.error = error.message;
  }
  messages.push(answer);
  running = { answer, controller };
  show();
  stick(true);
  announce("Answering");
  try {
    if (body) for await (const chunk of streamChat(body, controller.signal)) {
      addChunk(answer, chunk);
      draw();
    }
  } catch (error) {
    if (controller.signal.aborted) answer.finish_reason = "stopped";
    else await fail(answer, error);
  }
  running = null;
  show();
  if (answer.error) announce("");
  else announce(answer.finish_reason === "stopped" ? "Stopped" : "Answer complete");
  if (document.activeElement === document.body) $("prompt").focus(); // the Stop button had the focus, and is gone
}

async function fail(answer, error) {
  answer.error = error.status ? `${error.message} (${error.status})` : error.message;
  if (error.status === 401) askForKey();
}

function stop() {
  running?.controller.abort();
}

function send(text) {
  if (running || (!text.trim() && pictures.empty())) return;
  const images = pictures.take();
  if (editing) messages.length = messages.indexOf(editing);
  endEdit();
  messages.push(userMessage(text, images));
  void ask();
}

function regenerate() {
  if (running) return;
  messages.pop();
  void ask();
}

function sendResults(results) {
  if (running) return;
  for (const [id, content] of Object.entries(results)) messages.push({ role: "tool", tool_call_id: id, content });
  void ask();
}

// Showing -----------------------------------------------------------------------------------------------------------

const resultOf = (id) => messages.find((message) => message.role === "tool" && message.tool_call_id === id)?.content;

function viewOf(message) {
  if (message.role === "user") return userView(message, { edit: startEdit });
  return answerView(message, resultOf, { regenerate, sendResults });
}

/** Bring the page in line with the conversation. */
function show() {
  const shown = messages.filter((message) => message.role !== "tool");
  for (const message of shown) if (!views.has(message)) views.set(message, viewOf(message));
  for (const [message, view] of views) {
    if (shown.includes(message)) continue;
    view.element.remove();
    views.delete(message);
  }
  shown.forEach((message, index) => {
    const { element } = views.get(message);
    if ($("messages").children[index] !== element) $("messages").insertBefore(element, $("messages").children[index] ?? null);
    element.classList.toggle("last", index === shown.length - 1);
    element.classList.toggle("last-user", message === lastUser());
    views.get(message).update(message === running?.answer);
  });
  $("welcome").hidden = shown.length > 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("new-chat").disabled = $("export").disabled = !shown.length;
  stick();
}

let frame = 0;

/** Redraw the running answer at the next frame. */
function draw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!running) return;
    views.get(running.answer).update(true);
    stick();
  });
}

let following = true; // whether the view stays at the end as text arrives

function stick(now = following) {
  following = now;
  if (following) $("scroller").scrollTop = $("scroller").scrollHeight;
}

function announce(text) {
  $("announce").textContent = text;
}

// Editing -----------------------------------------------------------------------------------------------------------

const lastUser = () => messages.findLast((message) => message.role === "user");

function startEdit() {
  if (running || !lastUser()) return;
  editing = lastUser();
  $("editing").hidden = false;
  pictures.put(editing.images ?? []);
  fillPrompt(editing.content);
}

function endEdit() {
  editing = null;
  $("editing").hidden = true;
  fillPrompt("");
}

function fillPrompt(text) {
  $("prompt").value = text;
  grow();
  $("prompt").focus();
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

// The rest of the page ----------------------------------------------------------------------------------------------

function newChat() {
  stop();
  messages = [];
  endEdit();
  show();
  announce("");
}

function exportChat() {
  const told = messages.map((message) =>
    message.role === "assistant" ? { ...message, statistics: statistics(message) } : message,
  );
  const text = JSON.stringify({ exported_at: new Date().toISOString(), settings: readSettings(), messages: told }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: "chat.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function askForKey() {
  showSettings(true);
  $("key").focus();
}

/** Ask the server what it serves. */
async function connect() {
  try {
    const [models, info] = await Promise.all([getJson("/v1/models"), getJson("/server_info")]);
    showModels(models.data);
    const [model] = models.data;
    $("served").textContent = `${model.id} answers, with a context of ${model.max_model_len.toLocaleString("en")} tokens.`;
    pictures.enable(info.vision === true);
  } catch (error) {
    $("served").textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send($("prompt").value);
  } else if (event.key === "ArrowUp" && !$("prompt").value) {
    event.preventDefault();
    startEdit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (editing) endEdit();
});
$("scroller").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("scroller");
  following = scrollHeight - scrollTop - clientHeight < 40;
});
$("stop").addEventListener("click", stop);
$("cancel-edit").addEventListener("click", endEdit);
$("new-chat").addEventListener("click", newChat);
$("export").addEventListener("click", exportChat);
$("examples").append(...EXAMPLES.map((text) => make("li", {}, button(text, () => send(text)))));

const pictures = openImages();
const showSettings = openSettings(connect);
show();
void connect();
