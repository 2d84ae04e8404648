// Elements, and numbers as text.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function label(x, y, words, attributes = {}) {
  return svg("text", { x: round(x), y: round(y), ...attributes }, words);
}

const round = (value) => Math.round(value * 100) / 100;
const sum = (values) => values.reduce((total, value) => total + value, 0);

function digits(value) {
  const size = Math.abs(value);
  const decimals = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  const text = value.toFixed(decimals);
  return decimals ? text.replace(/\.?0+$/, "") : text.replace(/\B(?=(\d{3})+$)/g, ",");
}

function timeText(seconds) {
  if (seconds < 5e-10) return "0";
  const [unit, scale] = timeUnit(seconds);
  return `${digits(seconds / scale)} ${unit}`;
}

function timeUnit(seconds) {
  if (seconds >= 1) return ["s", 1];
  return seconds >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
}

function bytesText(nbytes) {
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const [unit, scale] = units.find(([, size]) => nbytes >= size) || ["bytes", 1];
  return `${digits(nbytes / scale)} ${unit}`;
}

const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

// 4–7, or 1, 5, 9, 13; long lists are cut.
function numbersText(numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  const texts = runs.flatMap(([a, b]) => (a === b ? [`${a}`] : b === a + 1 ? [`${a}`, `${b}`] : [`${a}–${b}`]));
  return texts.length > 8 ? [...texts.slice(0, 4), "…", texts[texts.length - 1]].join(", ") : texts.join(", ");
}

// Names as a list; a long one is cut.
const someText = (names) =>
  names.length > 9 ? `${names.slice(0, 8).join(", ")} and ${names.length - 8} more` : names.join(", ") || "nothing";

const cutText = (text, longest) => (text.length > longest ? `${text.slice(0, longest - 1)}…` : text);

const listText = (texts) =>
  texts.length < 2 ? texts.join("") : `${texts.slice(0, -1).join(", ")} and ${texts[texts.length - 1]}`;

// "3.2 times less", "1.1 times more", "as much".
function ratioText(value, other, less = "less", more = "more", same = "as much") {
  if (!value || !other) return value === other ? same : value < other ? less : more;
  const ratio = Math.max(value, other) / Math.min(value, other);
  if (ratio < 1.005) return same;
  return `${ratio < 10 ? ratio.toFixed(ratio < 2 ? 2 : 1) : Math.round(ratio)} times ${value < other ? less : more}`;
}

// Round numbers from 0 to `stop`.
function roundTicks(stop, wanted) {
  const rough = stop / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  return Array.from({ length: Math.floor(stop / step + 1e-9) + 1 }, (_, index) => index * step);
}

// "4, 5 and 6" in a paragraph whose parts may be set off: strings, or [tag, string].
function paragraph(...parts) {
  return html("p", {}, ...parts.map((part) => (Array.isArray(part) ? html(part[0], {}, part[1]) : part)));
}
