"use strict";
const root = document.documentElement;

function speak(language) {
  root.lang = language;
  document.title = document.querySelector(`main[lang=${language}] h1`).textContent;
}
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => speak(button.dataset.lang));
}
speak(navigator.language.startsWith("zh") ? "zh" : "en");

// A click on a header sorts; a second one turns the order. Unknown values stay last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const body = header.closest("table").tBodies[0];
    const up = header.getAttribute("aria-sort") !== "ascending";
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[header.cellIndex].dataset.value;
    const order = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const sign = up ? 1 : -1;
      return sign * (header.className === "word" ? a.localeCompare(b) : a - b);
    };
    body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
  });
}

const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const over = event.target.closest("[data-tip]");
  tip.hidden = !over;
  if (!over) return;
  tip.textContent = over.dataset.tip;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, event.clientY - height - 12)}px`;
});
