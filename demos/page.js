// Elements of the demo's page that Gradio has none for. No library, nothing from elsewhere.
(() => {
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  window.mmMake = make;

  // Frames of a clip: what the model sees beside what is left of it, and a scrubber.
  class Frames extends HTMLElement {
    static at = 0; // survives a new answer: the slider of budgets replaces the element

    static observedAttributes = ["data-frames"];

    connectedCallback() {
      // Gradio writes a new answer into the old element: other data, and no children.
      this.watcher ??= new MutationObserver(() => this.childElementCount || this.draw());
      this.watcher.observe(this, { childList: true });
      this.draw();
    }

    disconnectedCallback() { this.watcher.disconnect(); }

    attributeChangedCallback(name, before) {
      if (before !== null && this.isConnected) this.draw();
    }

    draw() {
      this.replaceChildren();
      this.range = null;
      this.frames = JSON.parse(this.dataset.frames);
      const pair = make("div", { class: "mm-pair" });
      for (const side of ["seen", "kept"]) {
        this[side] = make("img", { alt: "" });
        this[side + "Caption"] = make("figcaption");
        pair.append(make("figure", {}, this[side], this[side + "Caption"]));
      }
      this.append(pair);
      if (this.frames.length > 1) this.append(...this.scrubber());
      this.show(Math.min(Frames.at, this.frames.length - 1));
    }

    scrubber() {
      this.range = make("input", {
        type: "range", min: 0, max: this.frames.length - 1, step: 1, "aria-label": "Frame",
      });
      this.range.addEventListener("input", () => this.show(Number(this.range.value)));
      const strip = make("div", { class: "mm-strip", role: "group", "aria-label": "Frames" });
      this.buttons = this.frames.map((frame, number) => {
        const button = make(
          "button", { type: "button", "aria-label": frame.caption },
          make("img", { src: frame.kept, alt: "" }),
        );
        button.addEventListener("click", () => this.show(number));
        strip.append(button);
        return button;
      });
      return [make("label", { class: "mm-scrub" }, "Frame", this.range), strip];
    }

    show(number) {
      Frames.at = number;
      const frame = this.frames[number];
      this.seen.src = frame.seen;
      this.seen.alt = "What the model sees of frame " + (number + 1);
      this.seenCaption.textContent = "What the model sees";
      this.kept.src = frame.kept;
      this.kept.alt = frame.caption;
      this.keptCaption.textContent = frame.caption;
      if (!this.range) return;
      this.range.value = number;
      this.range.setAttribute("aria-valuetext", frame.caption);
      this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === number));
    }
  }
  if (!customElements.get("mm-frames")) customElements.define("mm-frames", Frames);

  // On a phone the results are below what is asked.
  window.mmReveal = (id) => {
    if (window.innerWidth > 640) return;
    document.getElementById(id)?.scrollIntoView({ behavior: "smooth", block: "start" });
  };

  // A file that is given makes the results stale, also one that is then refused.
  const given = (event) => {
    const area = event.target.closest?.(".mm-upload");
    if (area && (event.type === "drop" || event.target.type === "file"))
      document.getElementById(area.id + "-changed")?.click();
  };
  for (const type of ["change", "drop"]) document.addEventListener(type, given, true);

  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = make("textarea"); // a page without TLS has no clipboard
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    const label = (button.dataset.label ??= button.textContent);
    await copy(button.dataset.copy).then(
      () => (button.textContent = "Copied"), () => (button.textContent = "Not allowed; see below"),
    );
    setTimeout(() => (button.textContent = label), 1500);
  });
})();
