// Elements of the demo's page that Gradio has none for. No library, nothing from elsewhere.
(() => {
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  window.mmMake = make;

  // An element that draws itself from its data, also where Gradio writes new ones into it: other
  // data, and no children.
  class Drawing extends HTMLElement {
    connectedCallback() {
      this.watcher ??= new MutationObserver(() => this.childElementCount || this.draw());
      this.watcher.observe(this, { childList: true });
      this.draw();
    }

    disconnectedCallback() { this.watcher.disconnect(); }

    attributeChangedCallback(name, before) {
      if (before !== null && this.isConnected) this.draw();
    }
  }

  const shape = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  // Lines and dots over axes, as wide as the page; a dot says its figures when it is reached.
  class Plot extends Drawing {
    static observedAttributes = ["data-plot"];

    connectedCallback() {
      this.size ??= new ResizeObserver(() => this.clientWidth === this.width || this.draw());
      this.size.observe(this);
      super.connectedCallback();
    }

    disconnectedCallback() {
      this.size.disconnect();
      super.disconnectedCallback();
    }

    draw() {
      const plot = JSON.parse(this.dataset.plot), width = (this.width = this.clientWidth);
      if (!width) return; // on a tab that is not shown
      const wide = width > 600, height = wide ? 400 : 330, [left, right, top, bottom] = [44, width - 14, 30, height - 44];
      const x = (part) => left + (right - left) * part, y = (share) => bottom - (bottom - top) * share;
      const text = (at, up, anchor, words) => shape("text", { x: at, y: up, "text-anchor": anchor }, words);
      const line = (kind, x1, y1, x2, y2) => shape("line", { class: kind, x1, y1, x2, y2 });
      const parts = plot.marks.flatMap(([part, words]) => [
        line("mm-grid", x(part), bottom, x(part), top), text(x(part), bottom + 18, part > 0.97 ? "end" : "middle", words),
      ]);
      for (const share of [0, 0.2, 0.4, 0.6, 0.8, 1])
        parts.push(line("mm-grid", left, y(share), right, y(share)), text(left - 6, y(share) + 4, "end", Math.round(100 * share) + "%"));
      parts.push(text(x(0.5), height - 6, "middle", plot.below), text(left, 14, "start", plot.above));
      if (plot.level !== undefined) parts.push(line("mm-level", left, y(plot.level), right, y(plot.level)));
      const dot = ([part, share, short, long], reached) => {
        const at = { cx: x(part), cy: y(share) }, says = text((left + width) / 2, wide ? 14 : 26, "middle", wide ? long : short);
        says.setAttribute("class", "mm-says");
        const attributes = { class: "mm-dot", role: "img", "aria-label": long, ...(reached && { tabindex: 0 }) };
        return shape("g", attributes, shape("circle", { class: "mm-near", ...at, r: 9 }), shape("circle", { ...at, r: 3.5 }), says);
      };
      for (const { colour, line: corners, dots } of plot.series) {
        const points = corners.map(([part, share]) => x(part) + "," + y(share)).join(" ");
        const attributes = colour ? { class: "mm-curve mm-chosen", style: "--c:" + colour } : { class: "mm-curve" };
        parts.push(shape("g", attributes, shape("polyline", { points }), ...dots.map((each) => dot(each, Boolean(colour)))));
      }
      this.replaceChildren(shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": plot.label }, ...parts));
    }
  }
  if (!customElements.get("mm-plot")) customElements.define("mm-plot", Plot);

  // Frames of a clip: what the model sees beside what is left of it, and a scrubber.
  class Frames extends Drawing {
    static at = 0; // survives a new answer: the slider of budgets replaces the element

    static observedAttributes = ["data-frames"];

    draw() {
      this.replaceChildren();
      this.range = null;
      this.frames = JSON.parse(this.dataset.frames);
      this.word = this.frames[0]?.caption.startsWith("Frame") ? "Frame" : "View"; // of a picture
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
        type: "range", min: 0, max: this.frames.length - 1, step: 1, "aria-label": this.word,
      });
      this.range.addEventListener("input", () => this.show(Number(this.range.value)));
      const strip = make("div", { class: "mm-strip", role: "group", "aria-label": this.word + "s" });
      this.buttons = this.frames.map((frame, number) => {
        const button = make(
          "button", { type: "button", "aria-label": frame.caption },
          make("img", { src: frame.kept, alt: "" }),
        );
        button.addEventListener("click", () => this.show(number));
        strip.append(button);
        return button;
      });
      return [make("label", { class: "mm-scrub" }, this.word, this.range), strip];
    }

    show(number) {
      Frames.at = number;
      const frame = this.frames[number];
      this.seen.src = frame.seen;
      this.seen.alt = `What the model sees of ${this.word.toLowerCase()} ${number + 1}`;
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
