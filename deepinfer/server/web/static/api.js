// Requests to the server, with the API key of this tab, and server-sent events.

const KEY = "deepinfer-api-key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** What the server refused, in its own words. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0 for an error inside a stream
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  // A header can hold only Latin-1; any other key is wrong anyway, and the server should be the one to say so.
  if (getKey()) headers.Authorization = `Bearer ${getKey().replace(/[^\x21-\x7e]/g, "?")}`;
  const response = await fetch(path, { cache: "no-store", ...options, headers }).catch((error) => {
    throw error instanceof TypeError ? new ServerError("the server does not answer", 0) : error;
  });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ServerError(body?.error?.message ?? `${response.status} ${response.statusText}`, response.status);
  }
  return response;
}

export const getJson = async (path) => (await request(path)).json();
export const getText = async (path, options) => (await request(path, options)).text();

/** The data of every event in a stream of bytes, however it is cut into chunks. */
export async function* readEvents(stream) {
  let rest = "";
  let data = [];
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      // A "\r" at the end may be half of "\r\n": wait for what follows.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of a streamed chat completion.  Aborting `signal` closes the connection, which ends the request. */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 0);
    yield chunk;
  }
  throw new ServerError("the connection closed before the answer was complete", 0);
}
