// Makes pages live: reloads a page's parts when the store changes, keeps only a few rows of a long table in the page, and
// handles keys. Without this script, every page still shows everything, through links, forms and pages of rows.

const ROW_HEIGHT = 30;
const REFRESH_MS = 1000;
const MOST_MS = 10000;
const REST = 25; // times as long as reading took
const RETRY_MS = 3000;

document.documentElement.classList.add("scripted");

// Parts

async function parsed(url, headers = {}) {
  const response = await fetch(url, { headers: { accept: "text/html", ...headers } });
  if (!response.ok) throw new Error(`${response.status}`);
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

function replacePart(old, fresh) {
  if (old.innerHTML === fresh.innerHTML) return;
  const open = [...old.querySelectorAll("details")].map((each) => each.open);
  const ticked = new Set([...old.querySelectorAll("input:checked")].map((each) => each.id));
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && [focused.id, focused.getAttribute("href")];
  old.replaceChildren(...fresh.childNodes);
  [...old.querySelectorAll("details")].forEach((each, index) => {
    if (index < open.length) each.open = open[index];
  });
  for (const each of old.querySelectorAll("input[type=checkbox]")) each.checked = ticked.has(each.id);
  if (place) {
    const same = [...old.querySelectorAll("a, input, button, [tabindex]")].find(
      (each) => (place[0] && each.id === place[0]) || (place[1] && each.getAttribute("href") === place[1]),
    );
    same?.focus({ preventScroll: true });
  }
}

async function loadLate() {
  for (const part of document.querySelectorAll("[data-load]")) {
    const fresh = await parsed(part.dataset.load);
    replacePart(part, fresh.body);
  }
}

// A long table: only the visible rows, and some around them, are in the page.

class Window {
  constructor(element) {
    this.element = element;
    this.body = element.querySelector("tbody");
    this.url = element.dataset.url;
    this.count = Number(element.dataset.count);
    this.size = Number(element.dataset.size);
    this.kept = new Map();
    this.loading = new Set();
    this.above = this.gap();
    this.below = this.gap();
    this.generation = 0;
    const offset = Number(element.dataset.offset);
    const first = [...this.body.children];
    if (first.length && offset % this.size === 0) this.kept.set(offset / this.size, first);
    this.body.replaceChildren(this.above, ...first, this.below);
    this.resize(offset, first.length);
    if (offset) element.scrollTop = offset * ROW_HEIGHT;
    element.addEventListener("scroll", () => this.schedule(), { passive: true });
    this.show();
  }

  gap() {
    const row = document.createElement("tr");
    row.className = "gap";
    row.setAttribute("aria-hidden", "true");
    row.append(document.createElement("td"));
    row.firstChild.colSpan = 7;
    return row;
  }

  resize(start, shown) {
    this.above.firstChild.style.height = `${start * ROW_HEIGHT}px`;
    this.below.firstChild.style.height = `${Math.max(this.count - start - shown, 0) * ROW_HEIGHT}px`;
    this.above.hidden = start === 0;
    this.below.hidden = this.count <= start + shown;
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.show();
    });
  }

  chunks() {
    const first = Math.floor(this.element.scrollTop / ROW_HEIGHT);
    const last = first + Math.ceil(this.element.clientHeight / ROW_HEIGHT);
    const most = Math.max(Math.ceil(this.count / this.size) - 1, 0);
    const from = Math.min(Math.floor(first / this.size), most);
    const to = Math.min(Math.floor(last / this.size), most);
    return { from, to };
  }

  async show() {
    const { from, to } = this.chunks();
    const wanted = [];
    for (let chunk = from; chunk <= to; chunk++) wanted.push(chunk);
    await Promise.all(wanted.filter((chunk) => !this.kept.has(chunk)).map((chunk) => this.load(chunk)));
    const now = this.chunks();
    if (now.from !== from || now.to !== to) return;
    if (!wanted.every((chunk) => this.kept.has(chunk))) return;
    const rows = wanted.flatMap((chunk) => this.kept.get(chunk));
    const shown = [...this.body.children].slice(1, -1);
    if (shown.length !== rows.length || shown.some((row, index) => row !== rows[index])) {
      const top = this.element.scrollTop;
      this.body.replaceChildren(this.above, ...rows, this.below);
      this.resize(from * this.size, rows.length);
      this.element.scrollTop = top;
    }
    for (const chunk of this.kept.keys()) if (chunk < from - 2 || chunk > to + 2) this.kept.delete(chunk);
  }

  async load(chunk) {
    if (this.loading.has(chunk)) return;
    this.loading.add(chunk);
    const generation = this.generation;
    try {
      const joined = this.url.includes("?") ? "&" : "?";
      const response = await fetch(`${this.url}${joined}offset=${chunk * this.size}&limit=${this.size}`);
      if (!response.ok || generation !== this.generation) return;
      const holder = document.createElement("template");
      const text = await response.text();
      holder.innerHTML = `<table><tbody>${text}</tbody></table>`;
      this.kept.set(chunk, [...holder.content.querySelectorAll("tr")]);
    } finally {
      this.loading.delete(chunk);
      if (generation === this.generation) this.schedule();
    }
  }

  refresh(count) {
    this.count = count;
    this.generation += 1;
    this.kept.clear();
    this.loading.clear();
    this.show();
  }
}

// Live

let rowsWindow = null;
let pending = 0;
let last = 0;
let pause = REFRESH_MS;
let reading = false;

async function refresh() {
  pending = 0;
  if (reading) {
    // The answers of two concurrent requests could arrive out of order.
    changed();
    return;
  }
  reading = true;
  const began = performance.now();
  try {
    // Without the rows, which the window loads itself.
    await show(await parsed(location.href.split("#")[0], { "x-without-rows": "1" }));
  } catch {
    say("can't read the page again, trying again");
    setTimeout(changed, RETRY_MS);
  } finally {
    reading = false;
    last = performance.now();
    // The longer a refresh takes, the longer the pause, so that the page never slows down the run.
    pause = Math.min(Math.max(REFRESH_MS, REST * (last - began)), MOST_MS);
  }
}

async function show(fresh) {
  const moved = fresh.getElementById("window");
  const here = document.getElementById("window");
  if (Boolean(moved) !== Boolean(here) || fresh.title !== document.title) {
    // The first rows have arrived, or there is a newer latest run.
    document.getElementById("main").replaceChildren(...fresh.getElementById("main").childNodes);
    document.title = fresh.title;
    start();
    return;
  }
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = fresh.getElementById(part.id);
    if (part.dataset.load) {
      replacePart(part, (await parsed(part.dataset.load)).body);
    } else if (other) {
      replacePart(part, other);
      part.hidden = other.hidden;
    } else if (part.id === "chart") {
      part.replaceChildren();
    }
  }
  if (rowsWindow && moved) rowsWindow.refresh(Number(moved.dataset.count));
  showTicked();
}

function changed() {
  if (pending) return;
  const wait = reading ? pause : pause - (performance.now() - last);
  pending = setTimeout(refresh, Math.max(0, wait));
}

function say(text, place = "connection") {
  const element = document.getElementById(place);
  if (element.textContent !== text) element.textContent = text;
}

// Shows the result of a key or a button, until the next one.
function tell(text) {
  say(text, "told");
}

let source = null;
let version = document.body.dataset.live;

function listen() {
  if (!version) return;
  if (document.hidden) {
    // A browser opens at most six connections to a server, and every listening page holds one.
    source?.close();
    source = null;
    return;
  }
  if (source && source.readyState !== EventSource.CLOSED) return;
  source = new EventSource(`/live?since=${encodeURIComponent(version)}`);
  source.addEventListener("open", () => say("live"));
  source.addEventListener("error", () => {
    // The browser closes the source if the server answers with an error: another server listens there now.
    say(source.readyState === EventSource.CLOSED ? "the viewer has ended" : "not connected, trying again");
  });
  source.addEventListener("change", (event) => {
    version = event.lastEventId;
    changed();
  });
}

document.addEventListener("visibilitychange", listen);

// Keys

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
  return Boolean(link);
}

function withoutFlips() {
  return document.querySelector("[data-against], #flips")
    ? "no later row flipped"
    : "choose a run to compare with: then x leads to the next row that flipped";
}

function moveInList(step) {
  const rows = [...document.querySelectorAll("tr[data-row]")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  const next = rows[Math.min(Math.max(at + step, 0), rows.length - 1)];
  next.querySelector("th a")?.focus();
  next.scrollIntoView({ block: "nearest" });
}

const keys = {
  j: () => follow("[data-key=j]") || moveInList(1),
  k: () => follow("[data-key=k]") || moveInList(-1),
  f: () => follow("[data-key=f]"),
  x: () => follow("[data-key=x]") || tell(withoutFlips()),
  1: () => follow('[data-key="1"]'),
  0: () => follow('[data-key="0"]'),
  n: () => document.getElementById("note")?.focus(),
  "[": () => follow('[data-key="["]'),
  "]": () => follow('[data-key="]"]'),
  u: () => follow("[data-up]"),
  "/": () => document.getElementById("search")?.focus(),
  "?": () => document.getElementById("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const action = keys[event.key];
  if (action) {
    event.preventDefault();
    tell("");
    action();
  }
});

// Buttons and choices

document.addEventListener("click", (event) => {
  const copied = event.target.closest("[data-copy]");
  if (copied) {
    navigator.clipboard.writeText(document.getElementById(copied.dataset.copy).textContent).then(() => {
      copied.textContent = "Copied";
    });
  }
  if (event.target.closest("#help-button")) document.getElementById("help").showModal();
});

document.addEventListener("change", (event) => {
  if (event.target.id === "compare-with" && event.target.value) location.href = event.target.value;
  else if (event.target.classList.contains("tick")) showTicked();
  else if (event.target.matches(".filters select[name]")) event.target.form.requestSubmit();
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.method === "get") {
    // Leave out empty fields, which would make long URLs.
    for (const field of form.querySelectorAll("[name]")) if (!field.value) field.disabled = true;
  } else if (form.method === "post") {
    event.preventDefault();
    send(form, event.submitter);
  }
});

async function send(form, button) {
  const body = new URLSearchParams(new FormData(form));
  body.set(button.name, button.value);
  try {
    const answer = await fetch(form.action, { method: "POST", body });
    const text = await answer.text();
    if (!answer.ok) {
      tell(text);
      return;
    }
    form.querySelector("textarea")?.blur();
    await show(new DOMParser().parseFromString(text, "text/html"));
    tell("saved");
  } catch {
    tell("not saved: the viewer doesn't answer");
  }
}

function showTicked() {
  const bar = document.getElementById("compare-ticked");
  if (!bar) return;
  const ticked = [...document.querySelectorAll(".tick:checked")];
  const [b, a] = ticked;
  const two = ticked.length === 2 && a.dataset.repository === b.dataset.repository;
  bar.hidden = !ticked.length;
  bar.querySelector("span").textContent = two
    ? `${a.value} → ${b.value}`
    : ticked.length === 1
      ? "tick a second run to compare"
      : "tick two runs of one repository to compare";
  bar.querySelector("a").hidden = !two;
  if (two) bar.querySelector("a").href = `/compare/${a.dataset.repository}/${a.value}/${b.value}`;
}

// Start

function start() {
  const element = document.getElementById("window");
  rowsWindow = element ? new Window(element) : null;
  loadLate().catch(() => say("the figures could not be read"));
  showTicked();
  document.getElementById("first-divergence")?.scrollIntoView({ block: "center" });
}

window.addEventListener("pageshow", () => {
  // In a page from the back/forward cache, the fields that were empty at the last submit are still disabled.
  for (const field of document.querySelectorAll(".filters [disabled]")) field.disabled = false;
});

start();
listen();
