// The conversation: plain objects in the shape of Chat Completions, with what the page shows beside them.
//
// An answer is {role, content, reasoning, tool_calls, usage, times, finish_reason, error}; the request is made of the
// first ones.  `times` are milliseconds of performance.now(): asked, first and last token, end of thinking.

export const userMessage = (content, images) => ({ role: "user", content, images });

export const newAnswer = () => ({
  role: "assistant", content: "", reasoning: "", tool_calls: [], usage: null, finish_reason: null, error: null,
  times: { asked: performance.now(), first: null, last: null, thought: null },
});

/** Add one streamed chunk to the answer. */
export function addChunk(answer, chunk, now = performance.now()) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (reasoning || content || calls) {
    answer.times.first ??= now;
    answer.times.last = now;
  }
  if (reasoning) answer.reasoning += reasoning;
  if (answer.reasoning && (content || calls)) answer.times.thought ??= now;
  if (content) answer.content += content;
  for (const call of calls ?? []) {
    const known = (answer.tool_calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (call.id) known.id = call.id;
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) answer.finish_reason = choice.finish_reason;
}

/** {ttft in seconds, rate in tokens a second after the first, tokens}; null where it is not known. */
export function statistics(answer) {
  const { asked, first, last } = answer.times;
  const tokens = answer.usage?.completion_tokens ?? null;
  const seconds = first === null ? 0 : (last - first) / 1000;
  return {
    ttft: first === null ? null : (first - asked) / 1000,
    rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    tokens,
    promptTokens: answer.usage?.prompt_tokens ?? null,
  };
}

/** The `messages` of a request.  Answers that never began are left out. */
export function requestMessages(messages, system) {
  const told = system.trim() ? [{ role: "system", content: system }] : [];
  return told.concat(messages.filter((message) => message.role !== "assistant" || !isEmpty(message)).map(requestMessage));
}

const isEmpty = (answer) => !answer.content && !answer.reasoning && !answer.tool_calls.length;

function requestMessage(message) {
  if (message.role === "assistant") {
    const { content, reasoning, tool_calls } = message;
    return {
      role: "assistant", content,
      ...(reasoning && { reasoning_content: reasoning }),
      ...(tool_calls.length && { tool_calls }),
    };
  }
  if (message.images?.length) {
    const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: [...images, { type: "text", text: message.content }] };
  }
  const { images, ...rest } = message;
  return rest;
}
