"use strict";
(() => {
  const answers = JSON.parse(document.getElementById("data-answers").textContent);
  const list = document.getElementById("list");
  const tip = document.getElementById("tip");
  const spoken = document.getElementById("spoken");
  const status = document.getElementById("status");
  const category = document.getElementById("category");
  const order = document.getElementById("order");
  const contains = document.getElementById("contains");
  const plain = answers.map((answer) => (answer.prompt + answer.texts.join("")).toLowerCase());
  const cards = answers.map(() => null);
  let shown = [];

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
  const refusal = (answer, place) =>
    "refused: " + answer.rejected[place].map(visible).join(" | ") + "\nwritten: " + visible(answer.texts[place]);

  const fill = (card, answer) => {
    const text = card.querySelector(".answer");
    let box = text;
    let part = null;
    answer.texts.forEach((piece, place) => {
      const now = answer.parts.find((known) => known[1] <= place && place < known[2]);
      if (now !== part) {
        part = now;
        box = part && part[0] === "thinking" ? text.appendChild(element("span", "think")) : text;
      }
      const by = answer.by[place];
      const refused = answer.rejected[place] !== undefined;
      const token = element("span", "t p" + (by ? ((by - 1) % 6) + 1 : 0) + (refused ? " r" : ""), piece);
      token.dataset.place = place;
      box.appendChild(token);
    });
    if (answer.texts.length < answer.tokens) {
      text.appendChild(element("span", "rest", " … and " + (answer.tokens - answer.texts.length) + " more tokens"));
    }
  };

  const card = (number) => {
    if (cards[number]) return cards[number];
    const answer = answers[number];
    const made = element("article");
    made.tabIndex = 0;
    made.dataset.number = number;
    const heading = element(
      "h3", "", answer.category + " · acceptance length " + answer.length.toFixed(2) + " · " + answer.tokens +
      " tokens" + (answer.ended === "length" ? " · cut off" : "")
    );
    heading.id = "answer-" + number;
    made.setAttribute("aria-labelledby", heading.id);
    const prompt = element("details");
    prompt.append(element("summary", "", "Prompt"), element("div", "", answer.prompt));
    made.append(heading, prompt, element("p", "answer"));
    cards[number] = made;
    return made;
  };

  const ready = (made) => {
    if (made.dataset.filled) return;
    made.dataset.filled = "yes";
    fill(made, answers[made.dataset.number]);
  };

  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      ready(entry.target);
    }
  }, { rootMargin: "800px" });

  const ranks = {
    worst: (a, b) => answers[a].length - answers[b].length,
    best: (a, b) => answers[b].length - answers[a].length,
    given: (a, b) => a - b,
  };

  const show = () => {
    const wanted = contains.value.toLowerCase();
    shown = answers.map((_, number) => number).filter((number) =>
      (!category.value || answers[number].category === category.value) && plain[number].includes(wanted));
    shown.sort(ranks[order.value]);
    near.disconnect();
    hide();
    list.replaceChildren(...shown.map(card));
    for (const number of shown) near.observe(cards[number]);
    status.textContent = shown.length + " of " + answers.length + " answers";
  };

  const hide = () => {
    tip.hidden = true;
    for (const marked of list.querySelectorAll(".at")) marked.classList.remove("at");
  };

  const point = (token, speak) => {
    const answer = answers[token.closest("article").dataset.number];
    tip.textContent = refusal(answer, token.dataset.place);
    tip.hidden = false;
    const box = token.getBoundingClientRect();
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = window.scrollX + Math.max(8, left) + "px";
    tip.style.top = window.scrollY + box.bottom + 6 + "px";
    if (speak) spoken.textContent = tip.textContent;
  };

  list.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".r");
    if (token) point(token, false);
    else hide();
  });
  list.addEventListener("mouseleave", hide);
  list.addEventListener("click", (event) => {
    const token = event.target.closest(".r");
    if (token) point(token, true);
  });

  const move = (step) => {
    const now = document.activeElement.closest ? document.activeElement.closest("article") : null;
    const place = now ? shown.indexOf(Number(now.dataset.number)) + step : 0;
    const next = cards[shown[Math.max(0, Math.min(shown.length - 1, place))]];
    if (!next) return;
    ready(next);
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  };

  const walk = (step) => {
    const now = document.activeElement.closest ? document.activeElement.closest("article") : null;
    if (!now) return false;
    const refused = [...now.querySelectorAll(".r")];
    if (!refused.length) return false;
    const at = refused.findIndex((token) => token.classList.contains("at"));
    const next = refused[at < 0 ? (step > 0 ? 0 : refused.length - 1) : (at + step + refused.length) % refused.length];
    hide();
    next.classList.add("at");
    next.scrollIntoView({ block: "nearest" });
    point(next, true);
    return true;
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "Escape") hide();
    else if (event.key === "ArrowRight" && walk(1)) event.preventDefault();
    else if (event.key === "ArrowLeft" && walk(-1)) event.preventDefault();
  });
  for (const control of [category, order]) control.addEventListener("change", show);
  contains.addEventListener("input", show);
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  show();
})();
