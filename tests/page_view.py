"""The explorer page in a tab of a browser, and scripts that look at it there."""

from __future__ import annotations

from typing import Any

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 800}
READ = "(selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent)"


class View:
    """A tab with the page in it, and all it complained about or asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        self.tab = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.address = address

    def go(self, **choice: object) -> View:
        """Through the address: the first time as a link would, then as one who edits it."""
        values = "#" + "&".join(f"{name}={value}" for name, value in choice.items())
        if self.tab.url == "about:blank":
            self.tab.goto(self.address + values)
            self.tab.wait_for_selector("#choice-words p")  # the page unpacks its data before it draws
        else:
            self.run(
                "(hash) => new Promise((seen) => { addEventListener('hashchange', seen); location.hash = hash; })",
                values,
            )
        return self

    def run(self, script: str, argument: Any = None) -> Any:
        return self.tab.evaluate(script, argument)

    def texts(self, selector: str) -> list[str]:
        return list(self.run(READ, selector))

    def html(self, *ids: str) -> list[str]:
        return [self.run("(id) => document.getElementById(id).innerHTML", id_) for id_ in ids]

    def chosen(self) -> dict[str, str]:
        return dict(self.run("() => Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"))


# Texts of one picture that lie on each other; what stands in blocks and spans is centred in them and left out.
OVERLAPPING = """() => [...document.querySelectorAll('.picture svg, .scrolled svg')].flatMap((picture) => {
  const texts = [...picture.querySelectorAll('text:not(.number)')].map((t) => [t.textContent, t.getBBox()]);
  const apart = (a, b) => a.x + a.width <= b.x + 1 || b.x + b.width <= a.x + 1 ||
    a.y + a.height <= b.y + 4 || b.y + b.height <= a.y + 4;
  return texts.flatMap(([name, a], i) =>
    texts.slice(i + 1).filter(([, b]) => !apart(a, b)).map(([other]) => `${name}|${other}`));
})"""

# Texts that a box with an overflow cuts off, unless the box shows that it goes on.
CUT = """() => {
  const shown = [...document.querySelectorAll('body *')].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility() &&
    !e.closest('.hidden, .skip, .player, script, style, option'));
  const isCut = (e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    const { left, right, top, bottom } = range.getBoundingClientRect();
    if (left < -1 || right > document.documentElement.clientWidth + 1) return true;
    for (let box = e; box !== document.body; box = box.parentElement) {
      if (getComputedStyle(box).overflow === 'visible') continue;
      const edge = box.getBoundingClientRect();
      if (left < edge.left - 1 || right > edge.right + 1) return true;
      const isAbove = top < edge.top - 2, isBelow = bottom > edge.bottom + 2;
      const fades = (name) => box.classList.contains(name) && getComputedStyle(box).maskImage.includes('gradient');
      const folds = box.closest('.folded') && box.closest('.folded').querySelector('.fold').checkVisibility();
      if (!folds && ((isAbove && !fades('more-above')) || (isBelow && !fades('more-below')))) return true;
    }
    return false;
  };
  return shown.filter(isCut).map((e) => e.textContent);
}"""

# What takes the keyboard, one of each kind, by a selector.
FOCUSABLE = """() => {
  const found = new Map();
  for (const e of document.querySelectorAll('a[href], button, input, select, [tabindex="0"]')) {
    if (e.tabIndex < 0 || !e.checkVisibility()) continue;
    const kind = e.id ? `#${e.id}` : e.name ? `input[name=${e.name}]:checked` : `${e.tagName}.${e.className}`;
    found.set(kind, kind);
  }
  return [...found.keys()];
}"""

# Numbers of blocks that a line of the mask may go through: they touch the middle of the block, and have no halo.
CROSSED = """() => [...document.querySelectorAll('#matrix .number')].filter((number) => {
  const { x, y, width, height } = number.getBBox();
  const ground = document.querySelector('#matrix .ground').getBBox();
  const side = ground.width / document.querySelectorAll('#matrix [data-place]').length;
  const [left, top] = [x - ground.x, y - ground.y];
  const touches = (start, length) => Math.floor((start * 2) / side) !== Math.floor(((start + length) * 2) / side);
  const style = getComputedStyle(number);
  const hasHalo = style.paintOrder.startsWith('stroke') && parseFloat(style.strokeWidth) >= 2.5;
  return (touches(left, width) || touches(top + 3, height - 6)) && !(hasHalo && side < 40);
}).length"""

# Lines of grids and axes that go through a text of their picture.
STRUCK = """() => [...document.querySelectorAll('.picture svg')].flatMap((picture) => {
  if (!picture.checkVisibility()) return [];
  const lines = [...picture.querySelectorAll('line.rule, .axis line')].map((line) => line.getBBox());
  const meets = (a, b) =>
    a.x <= b.x + b.width && b.x <= a.x + a.width && a.y <= b.y + b.height && b.y <= a.y + a.height;
  return [...picture.querySelectorAll('text')].filter((text) => lines.some((line) => meets(line, text.getBBox())))
    .map((text) => text.textContent);
})"""

# The smallest contrast of any HTML text that is not in a picture.
WORST_CONTRAST = """(contrast) => {
  const texts = [...document.querySelectorAll('body *:not(svg *, script, style, option)')].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility());
  texts.forEach((e, index) => e.setAttribute('data-text', index));
  const found = contrast(texts.map((_, index) => [`[data-text="${index}"]`, null]));
  return found.map(([, ratio], index) => [ratio, texts[index].textContent.slice(0, 40)]).sort((a, b) => a[0] - b[0])[0];
}"""

CONTRAST = """(pairs) => {
  const c = document.createElement('canvas').getContext('2d', { willReadFrequently: true }), known = new Map();
  const parse = (text) => {
    if (!known.has(text)) {
      c.clearRect(0, 0, 1, 1);
      c.fillStyle = text;
      c.fillRect(0, 0, 1, 1);
      known.set(text, [...c.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(text);
  };
  const linear = (v) => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const c = parse(getComputedStyle(at).backgroundColor);
      if (c[3] > 250) return c;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  return pairs.map(([text, under]) => {
    const e = document.querySelector(text);
    if (!e) return [text, null];
    const style = getComputedStyle(e);
    const ink = parse(e instanceof SVGElement ? style.fill : style.color);
    const below = under ? parse(getComputedStyle(document.querySelector(under)).fill) : ground(e);
    return [`${text} on ${under || 'its ground'}`, ratio(ink, below)];
  });
}"""
TEXTS = [
    *[
        [name, None]
        for name in ("h1", "#problem", "legend", ".chip input:checked + span", ".chip input:not(:checked) + span")
    ],
    *[[name, None] for name in ("h2", "#steps li.past code", "#steps li[aria-selected=true] code", ".verb-recv b")],
    *[[name, None] for name in (".verb-send b", ".verb-compute b", ".index", ".readout", ".legend li", "dt", "dd")],
    *[[name, None] for name in (".words p", "#timeline-words", ".bar-name", ".bar-row[aria-pressed=true] .bar-value")],
    *[
        [name, None]
        for name in (".bar-value small", "#notes li", "footer p", "#where", ".lane-name", "#timeline .small")
    ],
    *[[name, None] for name in (".shard", ".shard.mine", ".source-name", "#growth text.mine", "h3")],
    [".span-name.compute", ".span.compute"],
]
NUMBERS = [[".tile .number", f".tone-{tone} path:not(.under)"] for tone in (0, 1, 2, 3, 4, 5, 6)]
