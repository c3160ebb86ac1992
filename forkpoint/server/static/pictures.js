/* Pictures of the message that is being written: pasted, dropped or chosen files, as data URLs. */

import { $, element } from "./dom.js";

const MAX_SIDE = 1536; // pixels; larger pictures are made smaller
const KEPT_BYTES = 256 * 1024; // a file of at most this size and side is sent as it is
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp"];
const QUALITY = 0.9;

export class Pictures {
  /* `view` shows them; `changed` is called when their number changes. */
  constructor(view, changed) {
    this.view = view;
    this.changed = changed;
    this.urls = [];
    this.reading = 0; // files that are not read yet
    this.areRefused = false; // because the model reads none
    this.note = "";
  }
  get isEmpty() {
    return !this.urls.length;
  }
  /* `canRead`: whether the model reads images. */
  offer(canRead) {
    this.areRefused = !canRead;
    $("add-pictures").hidden = !canRead;
  }
  async add(files) {
    this.note = this.areRefused ? "This model reads no images." : "";
    if (this.areRefused) return this.#draw();
    this.reading += files.length;
    this.#draw();
    for (const file of files) {
      try {
        this.urls.push(await dataUrl(file));
      } catch {
        this.note = `${file.name || "The picture"} cannot be read as an image.`;
      }
      this.reading--;
      this.#draw();
    }
  }
  /* Takes files that are chosen, pasted into `input` or dropped anywhere. */
  listen(input) {
    $("add-pictures").onclick = () => $("picture-files").click();
    $("picture-files").onchange = ({ target }) => {
      this.add([...target.files]);
      target.value = ""; // the same file may be chosen again
      input.focus();
    };
    input.onpaste = (event) => {
      const files = imageFiles(event.clipboardData);
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    };
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // the browser would leave the page for the file
      this.add([...event.dataTransfer.files]);
    });
  }
  /* Hands over the pictures, and forgets them. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.note = "";
    this.#draw();
    return urls;
  }
  #draw() {
    const parts = thumbnails(this.urls).map((image, index) =>
      element("span", { className: "picture" }, image, this.#removal(index)),
    );
    if (this.note) parts.push(element("span", { className: "none", role: "alert", textContent: this.note }));
    this.view.replaceChildren(...parts);
    this.view.hidden = !parts.length;
    this.changed();
  }
  #removal(index) {
    const remove = () => {
      this.urls.splice(index, 1);
      this.#draw();
    };
    return element("button", { type: "button", className: "quiet", ariaLabel: `Remove image ${index + 1}`, textContent: "✕", onclick: remove });
  }
}

export function thumbnails(urls) {
  return urls.map((src, index) => element("img", { src, alt: `Image ${index + 1}`, className: "thumbnail" }));
}

function imageFiles(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

/* What a server takes as the content of a message with pictures. */
export function contentWith(images, text) {
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

/* A copy of what was sent whose pictures are cut short, to be shown as text. */
export function withoutPictures(name, value) {
  return typeof value === "string" && value.startsWith("data:image/") ? value.slice(0, 48) + "…" : value;
}

async function dataUrl(file) {
  const bitmap = await createImageBitmap(file);
  try {
    const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
    if (scale === 1 && file.size <= KEPT_BYTES && KEPT_TYPES.includes(file.type)) return await fileUrl(file);
    const canvas = element("canvas", {
      width: Math.max(1, Math.round(bitmap.width * scale)),
      height: Math.max(1, Math.round(bitmap.height * scale)),
    });
    const context = canvas.getContext("2d");
    context.fillStyle = "white"; // a JPEG has no transparent parts
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/jpeg", QUALITY);
  } finally {
    bitmap.close();
  }
}

function fileUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
