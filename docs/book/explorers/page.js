// What the explorers' pages share: read the form, draw, say the numbers, keep the setting in the address.

if (self !== top) document.documentElement.classList.add("framed"); // inside a chapter

const $ = (selector) => document.querySelector(selector);

// {name: value} of the form's inputs; numbers are numbers.
function setting() {
  const value = (input) =>
    input.type === "checkbox" ? input.checked : input.type === "range" ? Number(input.value) : input.value;
  return Object.fromEntries([...$("form").elements].filter((e) => e.name).map((e) => [e.name, value(e)]));
}

// `draw(setting)` returns one sentence for the live region; it is called now and whenever an input changes.
function explorer(draw) {
  let said;
  const inputs = [...$("form").elements].filter((input) => input.name);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const input = inputs.find((one) => one.name === name);
    if (input?.type === "checkbox") input.checked = value === "true";
    else if (input) input.value = value;
  }
  const update = () => {
    for (const input of inputs) {
      const output = input.closest("label").querySelector("output");
      if (output && output.dataset.own === undefined) output.textContent = input.value;
    }
    const sentence = draw(setting());
    for (const output of document.querySelectorAll("form output")) {
      output.closest("label").querySelector("input").setAttribute("aria-valuetext", output.textContent);
    }
    clearTimeout(said); // a drag is said once, when it rests
    said = setTimeout(() => {
      $("#said").textContent = sentence;
      history.replaceState(null, "", `#${new URLSearchParams(setting())}`);
    }, 250);
  };
  $("form").addEventListener("input", update);
  $("form").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", () => ((free = 0), update()));
  update();
}

// Fill the list of numbers: {name: text}.
function numbers(found) {
  $("#numbers").innerHTML = Object.entries(found)
    .map(([name, text]) => `<div><dt>${name}</dt><dd>${text}</dd></div>`)
    .join("");
}

// Put a picture of a size in pixels: its inside, and in words what it shows. What is wider than the page scrolls.
function picture(inside, width, height, words, where = "#picture") {
  const size = `width="${width}" height="${height}" role="img" aria-label="${words}"`;
  $(where).innerHTML = `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${inside}</svg>`;
}

// Pixels that a picture may be wide; asked once, not while the page is being drawn.
let free = 0;
const room = (least) => Math.max(least, (free ||= $("#picture").clientWidth));

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// 12.3 GB, 4.5 ms: three digits, and a prefix for thousands.
function short(value, unit) {
  if (!value) return `0 ${unit}`;
  const power = Math.max(-3, Math.min(5, Math.floor(Math.log10(Math.abs(value)) / 3 + 1e-9)));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${["n", "µ", "m", "", "k", "M", "G", "T", "P"][power + 3]}${unit}`;
}

// 64 MiB, 10.7 MiB: powers of two.
function bytes(value) {
  const power = value ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
  return `${Number((value / 1024 ** power).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
