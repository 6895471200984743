// Images to send: dropped, pasted or chosen.  Off until the server says that its model sees (`vision` of /server_info).

import { button, make } from "./dom.js";

/** {enable(on), empty(), take(): data URLs, put(urls)} over the composer's list of images. */
export function openImages() {
  const list = document.getElementById("images");
  const chooser = document.getElementById("add-image");
  let enabled = false;
  let urls = [];

  function show() {
    list.replaceChildren(...urls.map((url, index) => {
      const remove = button("Remove", () => put(urls.filter((_, other) => other !== index)));
      return make("li", {}, make("img", { src: url, alt: `Image ${index + 1}` }), remove);
    }));
    list.hidden = !urls.length;
  }

  function put(next) {
    urls = next;
    show();
  }

  function add(files) {
    for (const file of enabled ? files : []) {
      if (!file.type.startsWith("image/")) continue;
      const reader = new FileReader();
      reader.onload = () => put([...urls, reader.result]);
      reader.readAsDataURL(file);
    }
  }

  const input = document.getElementById("image-file");
  input.addEventListener("change", () => {
    add(input.files);
    input.value = "";
  });
  document.addEventListener("paste", (event) => add(event.clipboardData.files));
  document.addEventListener("dragover", (event) => {
    if (enabled) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    if (!enabled) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });

  return {
    enable(on) {
      enabled = on;
      chooser.hidden = !on;
    },
    empty: () => !urls.length,
    take() {
      const taken = urls;
      put([]);
      return taken;
    },
    put,
  };
}
