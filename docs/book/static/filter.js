// Tables of class `filtered`: a box for words, a menu for each column of few values, all in the page.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.filtered")) {
    const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
    for (const row of rows) for (const [i, cell] of [...row.cells].entries()) if (i > 1 && cell.textContent) cell.dataset.label = heads[i].textContent;
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const bar = document.createElement("form"), words = document.createElement("input"), count = document.createElement("output");
    bar.className = "filter";
    words.type = "search";
    words.placeholder = "words, all of which must occur";
    words.setAttribute("aria-label", "Filter rows");
    bar.append(words);
    const menus = heads.flatMap((head, column) => {
      if (!head.dataset.menu) return [];
      const menu = document.createElement("select"), value = (row) => row.cells[column].textContent.trim();
      menu.append(new Option(head.textContent.trim() + ": all", ""));
      for (const one of [...new Set(rows.map(value))].sort()) menu.append(new Option(one, one));
      menu.setAttribute("aria-label", head.textContent.trim());
      bar.append(menu);
      return [[menu, value]];
    });
    const show = () => {
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      let seen = 0;
      rows.forEach((row, i) => {
        const hit = wanted.every((word) => texts[i].includes(word)) && menus.every(([menu, value]) => !menu.value || menu.value === value(row));
        row.hidden = !hit;
        seen += hit;
      });
      count.value = `${seen} of ${rows.length}`;
    };
    bar.addEventListener("input", show);
    bar.addEventListener("submit", (event) => event.preventDefault());
    bar.append(count);
    (table.closest(".wide") || table).before(bar);
    words.value = decodeURIComponent(location.hash.startsWith("#?") ? location.hash.slice(2) : "");
    show();
  }
});
