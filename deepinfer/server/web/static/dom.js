// Making elements.  Text only ever becomes text nodes: nothing on these pages parses HTML from a string.

/** An element; `props` are set as properties, children are nodes or strings. */
export function make(tag, props = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
}

/** A button that does not submit its form. */
export function button(label, act, props = {}) {
  return make("button", { type: "button", onclick: act, ...props }, label);
}

/** Copy to the clipboard, also where the clipboard API is missing (pages over plain HTTP from another machine). */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` gives, and says so. */
export function copyButton(text) {
  const copy = button("Copy", async () => {
    try {
      await copyText(text());
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return copy;
}
