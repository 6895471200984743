// The useful part of Markdown, built as DOM nodes.  No HTML passes through, no image is loaded: model output may come
// from whoever wrote the text it read, and an image's address can carry data away.

import { copyButton, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Cut text into blocks: {kind, source, ...}.  Equal sources give equal blocks, so that a stream redraws only its end. */
export function splitBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  let start = 0;
  const push = (kind, end, rest) => {
    blocks.push({ kind, source: lines.slice(start, end).join("\n"), ...rest });
    start = end;
  };
  const isTable = (at) =>
    lines[at].includes("|") && lines[at + 1]?.includes("|") && TABLE_LINE.test(lines[at + 1]);
  const starts = (at) =>
    [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines[at])) || isTable(at);

  while (start < lines.length) {
    const line = lines[start];
    let end = start + 1;
    let match;
    if (!line.trim()) {
      start += 1;
    } else if ((match = FENCE.exec(line))) {
      const close = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`);
      while (end < lines.length && !close.test(lines[end])) end += 1;
      const code = lines.slice(start + 1, end).join("\n");
      push("code", Math.min(end + 1, lines.length), { code, language: match[2] });
    } else if ((match = HEADING.exec(line))) {
      push("heading", end, { level: match[1].length, text: match[2].trim().replace(/\s#+$/, "") });
    } else if (RULE.test(line)) {
      push("rule", end, {});
    } else if (QUOTE.test(line)) {
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      push("quote", end, { text: lines.slice(start, end).map((quoted) => QUOTE.exec(quoted)[1]).join("\n") });
    } else if (ITEM.test(line)) {
      // A list goes on over indented lines, and over one empty line before another item; not into one of another kind.
      const kind = (at) => /^\d/.test(lines[at]);
      const goesOn = (at) => /^\s+\S/.test(lines[at] ?? "") || (ITEM.test(lines[at] ?? "") && kind(at) === kind(start));
      while (end < lines.length && (goesOn(end) || (!lines[end].trim() && goesOn(end + 1)))) end += 1;
      push("list", end, { lines: lines.slice(start, end) });
    } else if (isTable(start)) {
      while (end < lines.length && lines[end].includes("|")) end += 1;
      push("table", end, { rows: lines.slice(start, end).filter((_, index) => index !== 1).map(cells) });
    } else {
      while (end < lines.length && lines[end].trim() && !starts(end)) end += 1;
      push("paragraph", end, { text: lines.slice(start, end).join("\n") });
    }
  }
  return blocks;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

const INLINE = new RegExp(
  [
    /(`+)(?<code>[^`](?:.*?[^`])?)\1(?!`)/, // `code`
    /!?\[(?<label>[^\]\n]*)\]\((?<url>[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)/, // [label](url)
    /(?<bare>https?:\/\/(?:\([^\s()<>]*\)|[^\s<>"'`()])*(?:\([^\s()<>]*\)|[^\s<>"'`().,;:!?\]}*_]))/, // an address in the text
    /\*\*(?<strong>\S(?:.*?\S)??)\*\*/, // **strong**
    /\*(?<em>[^\s*](?:[^*]*[^\s*])?)\*/, // *emphasis*
    /~~(?<del>\S(?:.*?\S)??)~~/, // ~~struck~~
  ].map((pattern) => pattern.source).join("|"),
  "s",
);

/** Inline markup of `text`, as nodes; `depth` bounds the nesting that hostile text can ask for. */
export function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const match = depth < 6 ? INLINE.exec(text) : null;
    if (!match) {
      nodes.push(text);
      break;
    }
    if (match.index) nodes.push(text.slice(0, match.index));
    nodes.push(inlineNode(match, depth + 1));
    text = text.slice(match.index + match[0].length);
  }
  return nodes;
}

function inlineNode(match, depth) {
  const { code, label, url, bare, strong, em, del } = match.groups;
  if (code !== undefined) return make("code", {}, code);
  if (bare !== undefined) return link(bare, [bare], bare);
  if (url !== undefined) return link(url, label ? inline(label, depth) : [url], match[0]);
  if (strong !== undefined) return make("strong", {}, ...inline(strong, depth));
  if (em !== undefined) return make("em", {}, ...inline(em, depth));
  return make("del", {}, ...inline(del, depth));
}

/** A link, if the address is one that only leads somewhere; else the text as it was written. */
function link(url, children, source) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return source;
  }
  if (!["http:", "https:", "mailto:"].includes(parsed.protocol)) return source;
  return make("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

const withBreaks = (text) =>
  text.split("\n").flatMap((line, index) => (index ? [make("br"), ...inline(line)] : inline(line)));

/** Nested lists from lines, by their indentation. */
function list(lines) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(marker);
  const result = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(marker, 10) } : {});
  for (let at = 0; at < lines.length; ) {
    const own = ITEM.exec(lines[at])?.[3] ?? lines[at].trim();
    let end = at + 1;
    const belongs = (line) => !ITEM.test(line) || ITEM.exec(line)[1].length > indent.length + 1;
    while (end < lines.length && belongs(lines[end])) end += 1;
    const inner = lines.slice(at + 1, end);
    const nested = inner.findIndex((line) => ITEM.test(line));
    const text = [own, ...(nested < 0 ? inner : inner.slice(0, nested))].map((line) => line.trim()).filter(Boolean);
    const item = make("li", {}, ...withBreaks(text.join("\n")));
    if (nested >= 0) item.append(list(inner.slice(nested)));
    result.append(item);
    at = end;
  }
  return result;
}

function blockNode(block, depth) {
  switch (block.kind) {
    case "code": {
      const head = make("div", { className: "code-head" }, make("span", {}, block.language || "text"), copyButton(() => block.code));
      return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, make("code", {}, block.code)));
    }
    case "heading": // the page's own headings come first
      return make(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text));
    case "rule":
      return make("hr");
    case "quote": {
      const quote = make("blockquote");
      if (depth < 4) renderMarkdown(quote, block.text, depth + 1);
      else quote.append(block.text);
      return quote;
    }
    case "list":
      return list(block.lines);
    case "table": {
      const [head, ...rows] = block.rows;
      const row = (tag, texts) => make("tr", {}, ...head.map((_, index) => make(tag, {}, ...inline(texts[index] ?? ""))));
      const table = make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((texts) => row("td", texts))));
      return make("div", { className: "table" }, table);
    }
    default:
      return make("p", {}, ...withBreaks(block.text));
  }
}

const sources = new WeakMap(); // drawn block -> its source

/** Make `element` show `text`, redrawing from the first block that changed. */
export function renderMarkdown(element, text, depth = 0) {
  const blocks = splitBlocks(text);
  let same = 0;
  while (same < blocks.length && sources.get(element.children[same]) === blocks[same].source) same += 1;
  while (element.children.length > same) element.lastElementChild.remove();
  for (const block of blocks.slice(same)) {
    const node = blockNode(block, depth);
    sources.set(node, block.source);
    element.append(node);
  }
}
