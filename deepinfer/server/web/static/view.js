// Drawing messages.  Each has one view: {element, update()}; update() is cheap enough to run for every frame.

import { statistics } from "./conversation.js";
import { button, copyButton, make } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const ENDINGS = {
  length: "cut off by the length limit",
  abort: "aborted by the server",
  content_filter: "filtered",
  stopped: "stopped",
};

export function userView(message, actions) {
  const bubble = make("div", { className: "bubble" });
  for (const url of message.images ?? []) bubble.append(make("img", { src: url, alt: "Image sent" }));
  bubble.append(make("div", { className: "plain" }, message.content));
  const foot = make("div", { className: "actions" }, button("Edit", actions.edit, { className: "edit" }), copyButton(() => message.content));
  const element = make("article", { className: "message user" }, bubble, foot);
  element.setAttribute("aria-label", "You");
  return { element, update() {} };
}

/** `results(id)` is the result of a tool call, or undefined; `actions`: regenerate(), sendResults({id: text}). */
export function answerView(answer, results, actions) {
  const thought = make("div", { className: "plain" });
  const summary = make("summary");
  const thinking = make("details", { className: "thinking", hidden: true }, summary, thought);
  const content = make("div", { className: "markdown" });
  const calls = make("div", { className: "calls" });
  const error = make("div", { className: "error", role: "alert", hidden: true });
  const figures = make("span", { className: "figures" });
  const copy = copyButton(() => answer.content);
  const buttons = make("span", { className: "buttons" }, copy, button("Regenerate", actions.regenerate, { className: "regenerate" }));
  const foot = make("div", { className: "actions" }, figures, buttons);
  const waiting = make("div", { className: "waiting" }, make("i"), make("i"), make("i"));
  waiting.setAttribute("aria-hidden", "true");
  const element = make("article", { className: "message assistant" }, waiting, thinking, content, calls, error, foot);
  element.setAttribute("aria-label", "Answer");

  function update(running) {
    element.setAttribute("aria-busy", String(running));
    element.classList.toggle("running", running);
    waiting.hidden = !running || answer.times.first !== null;
    thinking.hidden = !answer.reasoning;
    if (answer.reasoning.length > thought.textContent.length) thought.append(answer.reasoning.slice(thought.textContent.length));
    summary.textContent = thinkingTitle(answer, running);
    renderMarkdown(content, answer.content);
    drawCalls(running);
    error.hidden = !answer.error;
    error.textContent = answer.error ?? "";
    figures.textContent = figuresText(answer, running);
    buttons.hidden = running;
    copy.hidden = !answer.content;
  }

  function drawCalls(running) {
    answer.tool_calls.forEach((call, index) => {
      const card = calls.children[index] ?? calls.appendChild(newCard(index));
      card.querySelector(".name").textContent = call.function.name;
      card.querySelector(".arguments").textContent = pretty(call.function.arguments);
      const result = results(call.id);
      card.querySelector(".ask").hidden = running || result !== undefined;
      card.querySelector(".result").hidden = result === undefined;
      card.querySelector(".result pre").textContent = result ?? "";
    });
    const open = !running && answer.tool_calls.some((call) => results(call.id) === undefined);
    if (open && !calls.querySelector(".send-results")) {
      calls.append(button("Send results", sendResults, { className: "primary send-results" }));
    } else if (!open) {
      calls.querySelector(".send-results")?.remove();
    }
  }

  function sendResults() {
    const fields = [...calls.querySelectorAll("textarea")];
    actions.sendResults(Object.fromEntries(answer.tool_calls.map((call, index) => [call.id, fields[index].value])));
  }

  return { element, update };
}

function newCard(index) {
  const label = make("label", { className: "ask" }, "Result");
  label.append(make("textarea", { rows: 2, spellcheck: false, placeholder: "What the tool answers" }));
  const result = make("div", { className: "result" }, make("span", { className: "label" }, "Result"), make("pre"));
  const head = make("header", {}, make("span", { className: "label" }, "Tool call"), make("code", { className: "name" }));
  const card = make("section", { className: "call" }, head, make("pre", { className: "arguments", tabIndex: 0 }), label, result);
  card.setAttribute("aria-label", `Tool call ${index + 1}`);
  return card;
}

/** Arguments with line breaks once they are complete; until then, and if they are not JSON, as they came. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function thinkingTitle(answer, running) {
  const { first, last, thought } = answer.times;
  if (running && thought === null) return "Thinking…";
  return `Thought for ${seconds(((thought ?? last) - first) / 1000)}`;
}

const seconds = (value) => (value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`);

function figuresText(answer, running) {
  const { ttft, rate, tokens, promptTokens } = statistics(answer);
  const parts = [];
  if (ttft !== null) parts.push(`TTFT ${seconds(ttft)}`);
  if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (tokens !== null) parts.push(`${promptTokens} in, ${tokens} out`);
  if (!running && ENDINGS[answer.finish_reason]) parts.push(ENDINGS[answer.finish_reason]);
  return parts.join(" · ");
}
