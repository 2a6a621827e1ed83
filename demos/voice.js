// The conversation of the tab "Voice": microphone in, events and sound out, over one WebSocket.
(() => {
  const make = window.mmMake;
  const RECORDER = `registerProcessor("mm-recorder", class extends AudioWorkletProcessor {
    constructor() { super(); this.block = new Int16Array(1024); this.at = 0; }
    process([input]) {
      for (const sample of input[0] || []) {
        this.block[this.at++] = Math.max(-1, Math.min(1, sample)) * 32767;
        if (this.at === this.block.length) { this.port.postMessage(this.block.slice()); this.at = 0; }
      }
      return true;
    }
  });`;

  // Plays pieces of a reply one behind the other, and knows how much of it was heard.
  class Player {
    constructor(context) { this.context = context; this.clear(); }
    clear() { this.pieces = []; this.next = 0; this.item = ""; }

    add(item, from, rate, pcm) {
      if (item !== this.item) { this.clear(); this.item = item; }
      const buffer = this.context.createBuffer(1, Math.max(pcm.length, 1), rate);
      const channel = buffer.getChannelData(0);
      for (let i = 0; i < pcm.length; i++) channel[i] = pcm[i] / 32768;
      const source = this.context.createBufferSource();
      source.buffer = buffer;
      source.connect(this.context.destination);
      const at = Math.max(this.context.currentTime + 0.04, this.next);
      source.start(at);
      this.next = at + buffer.duration;
      this.pieces.push({ source, at, from, ms: 1000 * buffer.duration });
    }

    heard() {
      const now = this.context.currentTime;
      const done = this.pieces.filter((piece) => piece.at <= now)
        .map((piece) => piece.from + Math.min(piece.ms, 1000 * (now - piece.at)));
      return done.length ? Math.max(...done) : 0;
    }

    stop() {
      const ms = this.heard();
      for (const piece of this.pieces) piece.source.stop();
      this.pieces = [];
      this.next = 0;
      return ms;
    }

    get sounding() { return this.next > this.context.currentTime; }
  }

  class Voice extends HTMLElement {
    connectedCallback() {
      if (this.childElementCount) return;
      const choices = JSON.parse(this.dataset.choices);
      this.asks = JSON.parse(this.dataset.asks);
      this.about = this.select("Talk", choices.about);
      this.voice = this.select("Voice of the reply", choices.voices);
      this.about.addEventListener("change", () => this.suggest());
      this.button = make("button", { type: "button", class: "mm-button mm-primary", "aria-pressed": "false" }, "Start talking");
      this.button.addEventListener("click", () => (this.socket ? this.stop("Stopped.") : this.begin()));
      this.hush = make("button", { type: "button", class: "mm-button", disabled: "" }, "Interrupt");
      this.hush.addEventListener("click", () => this.send({ type: "cancel" }));
      this.level = make("meter", { min: 0, max: 1, value: 0, "aria-label": "Level of the microphone" });
      this.status = make("p", { class: "mm-soft", role: "status" }, "The microphone is off.");
      this.hint = make("p", { class: "mm-soft" });
      this.log = make("ol", { class: "mm-talk", role: "log", "aria-label": "Transcript", tabindex: "0" });
      this.append(
        make("div", { class: "mm-controls" }, this.about.parentElement, this.voice.parentElement,
          make("div", { class: "mm-buttons" }, this.button, this.hush, this.level)),
        this.status, this.hint, this.log,
      );
      this.suggest();
    }

    disconnectedCallback() { this.stop(""); }

    select(label, choices) {
      const select = make("select", {}, ...choices.map(([value, text]) => make("option", { value }, text)));
      make("label", {}, label, select);
      return select;
    }

    suggest() {
      this.hint.textContent = "It understands, for example: " + this.asks[this.about.value].join("  ·  ");
    }

    async begin() {
      this.button.disabled = true;
      try {
        if (!navigator.mediaDevices) throw new Error("the microphone needs https, or localhost");
        this.microphone = await navigator.mediaDevices.getUserMedia({
          audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true },
        });
        this.context = new AudioContext();
        await this.context.resume();
        this.player = new Player(this.context);
        await this.connect();
        await this.record();
      } catch (error) {
        this.stop("No conversation: " + (error.message || error.name || "the connection failed"));
      }
      this.button.disabled = false;
    }

    connect() {
      const where = new URL(location.pathname.replace(/\/?$/, "/") + "voice-socket", location.href);
      where.protocol = where.protocol.replace("http", "ws");
      this.socket = new WebSocket(where);
      this.socket.binaryType = "arraybuffer";
      this.socket.onclose = () => this.stop(this.problem || "The conversation is over.");
      this.problem = "";
      return new Promise((good, bad) => {
        this.socket.onerror = () => bad(new Error("the connection failed"));
        this.socket.onopen = () => this.send({
          type: "start", rate: this.context.sampleRate, about: this.about.value, voice: this.voice.value,
        });
        this.socket.onmessage = ({ data }) => {
          if (data instanceof ArrayBuffer) return this.sound(new Int16Array(data));
          const event = JSON.parse(data);
          if (event.kind === "ready") {
            this.button.textContent = "Stop talking";
            this.button.setAttribute("aria-pressed", "true");
            this.say("Listening. Speak.");
            good();
          } else if (event.kind === "error" && !this.items) {
            this.problem = event.text;
            bad(new Error(event.text));
          } else this.take(event);
        };
        this.items = new Map();
      });
    }

    async record() {
      const code = URL.createObjectURL(new Blob([RECORDER], { type: "text/javascript" }));
      await this.context.audioWorklet.addModule(code);
      URL.revokeObjectURL(code);
      const recorder = new AudioWorkletNode(this.context, "mm-recorder", { numberOfOutputs: 0 });
      recorder.port.onmessage = ({ data }) => {
        this.level.value = Math.min(1, 3 * data.reduce((most, x) => Math.max(most, Math.abs(x)), 0) / 32768);
        if (this.socket && this.socket.readyState === 1) this.socket.send(data.buffer);
      };
      this.context.createMediaStreamSource(this.microphone).connect(recorder);
      this.timer = setInterval(() => this.idle(), 250);
    }

    take(event) {
      const { kind, item, text } = event;
      if (kind === "speech_started") this.say("Listening …");
      else if (kind === "speech_stopped") this.say("Thinking …");
      else if (kind === "committed") this.line(item, "you", text || "…");
      else if (kind === "heard") this.line(item, "you", text);
      else if (kind === "reply_started") this.line(item, "mmfast", "");
      else if (kind === "text") this.said(item, text);
      else if (kind === "audio") { this.header = event; this.hush.disabled = false; this.say("Speaking …"); }
      else if (kind === "interrupted") this.interrupted(item, text);
      else if (kind === "truncated") this.cut(item, text);
      else if (kind === "deleted") this.items.get(item)?.remove();
      else if (kind === "error") this.say("No reply: " + text);
      else if (kind === "done") this.figures(event);
    }

    sound(pcm) {
      const { item, audio_ms, rate } = this.header;
      this.player.add(item, audio_ms, rate, pcm);
    }

    interrupted(item, text) {
      const ms = this.player.item === item ? this.player.stop() : 0;
      this.hush.disabled = true;
      this.send({ type: "truncate", item, ms });
      this.cut(item, text);
      this.say("Interrupted. Listening …");
    }

    line(item, who, text) {
      let line = this.items.get(item);
      if (!line) {
        line = make("li", { class: who === "you" ? "mm-you" : "mm-it" }, make("b", {}, who), make("span"), make("s"), make("small"));
        this.items.set(item, line);
        this.log.append(line);
        while (this.log.childElementCount > 60) this.log.firstChild.remove();
      }
      if (text) line.querySelector("span").textContent = text;
      this.log.scrollTop = this.log.scrollHeight;
      return line;
    }

    said(item, text) {
      this.line(item, "mmfast", "").querySelector("span").textContent += text;
    }

    cut(item, text) {
      const line = this.items.get(item);
      if (!line) return;
      const [heard, lost] = [line.querySelector("span"), line.querySelector("s")];
      const whole = heard.textContent + lost.textContent;
      heard.textContent = text;
      lost.textContent = whole.startsWith(text) ? whole.slice(text.length) : "";
      line.querySelector("small").textContent = "interrupted: this much was heard";
      line.classList.add("mm-cut");
    }

    figures({ item, status, stats }) {
      const small = this.items.get(item)?.querySelector("small");
      if (!small || small.textContent || status !== "completed" || !stats) return;
      const parts = [];
      if (stats.first_audio_ms) parts.push("first sound after " + Math.round(stats.first_audio_ms) + " ms");
      if (stats.tokens_per_pass) parts.push(stats.tokens_per_pass.toFixed(1) + " audio tokens a pass");
      small.textContent = parts.join(" · ");
    }

    idle() {
      if (this.player.sounding || this.hush.disabled) return;
      this.hush.disabled = true;
      this.say("Listening. Speak.");
    }

    say(text) { if (this.status.textContent !== text) this.status.textContent = text; }

    send(message) {
      if (this.socket && this.socket.readyState === 1) this.socket.send(JSON.stringify(message));
    }

    stop(reason) {
      clearInterval(this.timer);
      const socket = this.socket;
      this.socket = null;
      if (socket) { socket.onclose = socket.onerror = socket.onmessage = null; socket.close(); }
      for (const track of this.microphone?.getTracks() || []) track.stop();
      this.microphone = null;
      if (this.player) this.player.stop();
      if (this.context && this.context.state !== "closed") this.context.close();
      this.player = this.context = null;
      if (!this.button) return;
      this.button.textContent = "Start talking";
      this.button.setAttribute("aria-pressed", "false");
      this.hush.disabled = true;
      this.level.value = 0;
      if (reason) this.say(reason);
    }
  }
  if (!customElements.get("mm-voice")) customElements.define("mm-voice", Voice);
})();
