"use strict";
// Tables sort by a click or a key on a heading: numbers from the largest, text from A, again the other way round.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const numeric = head.classList.contains("n");
    const value = (row) => {
      const cell = row.cells[column];
      return numeric ? (cell.dataset.v === undefined ? null : Number(cell.dataset.v)) : cell.textContent;
    };
    button.addEventListener("click", () => {
      const down = head.ariaSort ? head.ariaSort === "ascending" : numeric;
      const order = (a, b) => (numeric ? a - b : a.localeCompare(b, undefined, { numeric: true }));
      const rows = [...body.rows].map((row) => [value(row), row]);
      rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (down ? -1 : 1) * order(a, b)));
      body.append(...rows.map(([, row]) => row));
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.ariaSort = down ? "descending" : "ascending";
    });
  });
}

// The search box of the catalog keeps the rows that hold every word.
for (const box of document.querySelectorAll("input[type=search]")) {
  const rows = [...document.querySelectorAll("tbody tr")].map((row) => [row.textContent.toLowerCase(), row]);
  const count = document.querySelector("output");
  box.closest("form").hidden = false;
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const [text, row] of rows) row.hidden = !words.every((word) => text.includes(word));
    count.textContent = `${rows.filter(([, row]) => !row.hidden).length} of ${rows.length}`;
  };
  box.closest("form").addEventListener("submit", (event) => event.preventDefault());
  box.addEventListener("input", filter);
  filter();
}

for (const block of document.querySelectorAll("pre.copy")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${block.parentNode.querySelector("figcaption").textContent}`);
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(block);
    await navigator.clipboard?.writeText(block.textContent); // absent on plain http: what is selected can be copied
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
  });
  block.parentNode.append(button);
}
