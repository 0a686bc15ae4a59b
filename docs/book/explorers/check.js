// What check.py asks of a page that is open in a browser.

// Milliseconds until something was drawn.
const firstPaint = () =>
  new Promise((done) => {
    const seen = (list) => done(list.getEntries()[0].startTime);
    new PerformanceObserver(seen).observe({ type: "paint", buffered: true });
  });

// Milliseconds of each of 50 steps of a slider: compute, draw, lay out.
function drags(name) {
  const input = document.querySelector(`[name=${name}]`);
  const [least, most, step] = [input.min, input.max, input.step || 1].map(Number);
  const places = Math.floor((most - least) / step) + 1;
  return [...Array(50).keys()].map((drag) => {
    input.value = least + (drag % places) * step;
    const start = performance.now();
    input.dispatchEvent(new Event("input", { bubbles: true }));
    document.body.getBoundingClientRect();
    return performance.now() - start;
  });
}

// What a keyboard, a screen reader or a narrow window would miss.
function faults() {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  for (const input of all("input, select")) if (!input.labels.length) found.push(`${input.name} has no label`);
  for (const svg of all("svg:not([aria-hidden], [aria-hidden] *)")) {
    if (svg.getAttribute("role") !== "img" || !svg.getAttribute("aria-label")) found.push("a picture without words");
  }
  if (!document.querySelector("[role=status]")) found.push("no live region");
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`${wide} wide in a window of ${innerWidth}`);
  return found;
}
