// Keys, and a refresh while a run trains. Texts are only compared, never written into the page.
const items = () => [...document.querySelectorAll("a.item, summary.item")].filter((each) => each.offsetParent !== null);
const sibling = (rel) => document.querySelector(`a[rel=${rel}]`);

function move(by) {
  const all = items();
  const at = all.indexOf(document.activeElement);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1)];
  if (next) next.focus();
}

// Made here, since without a script a field of its own would be of no use.
const field = Object.assign(document.createElement("input"), { type: "search", autocomplete: "off" });
const searching = Object.assign(document.createElement("form"), { className: "search", hidden: true });
searching.setAttribute("role", "search");
searching.append(document.createElement("label"));
searching.firstChild.append("search in the page ", field);
document.querySelector("header").append(searching);

function search() {
  searching.hidden = false;
  field.select();
}

function find(wanted) {
  field.blur(); // the browser would find the text of the field itself
  for (const each of document.querySelectorAll("details")) {
    if (each.textContent.toLowerCase().includes(wanted.toLowerCase())) each.open = true;
  }
  window.find(wanted, false, false, true);
}

searching.addEventListener("submit", (event) => {
  event.preventDefault();
  if (field.value) find(field.value);
});
field.addEventListener("keydown", (event) => {
  if (event.key === "Escape") searching.hidden = true;
});

function label(choice) {
  const button = document.querySelector(`form.label button[value=${choice}]`);
  if (button) button.click();
}

const keys = {
  j: () => move(1),
  k: () => move(-1),
  "/": search,
  y: () => label("yes"),
  n: () => label("no"),
  "]": () => sibling("next")?.click(),
  "[": () => sibling("prev")?.click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

const seconds = Number(document.body.dataset.live);
if (seconds) {
  const content = (page) => page.querySelector("main")?.textContent;
  // What is stored between this page's answer and the first poll differs from what is shown, too.
  const shown = content(document);
  const poll = async () => {
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      const stored = new DOMParser().parseFromString(await answer.text(), "text/html");
      // What is being typed would be lost.
      const typing = document.activeElement.matches("input");
      if (answer.ok && !typing && content(stored) !== shown) return location.reload();
    } catch {
      // The server was stopped; it may come back.
    }
    setTimeout(poll, seconds * 1000);
  };
  poll();
}
