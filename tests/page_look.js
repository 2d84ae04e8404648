// What the tests of the explorer ask a browser about the page. Loaded into it as `look`.
window.look = {
  texts: (selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent),

  // Texts of one picture that lie on each other; what stands in blocks and spans is centred in them and left out.
  overlapping: () => [...document.querySelectorAll('.picture svg, .scrolled svg')].flatMap((picture) => {
    const texts = [...picture.querySelectorAll('text:not(.number)')].map((t) => [t.textContent, t.getBBox()]);
    const apart = (a, b) => a.x + a.width <= b.x + 1 || b.x + b.width <= a.x + 1 ||
      a.y + a.height <= b.y + 4 || b.y + b.height <= a.y + 4;
    return texts.flatMap(([name, a], i) =>
      texts.slice(i + 1).filter(([, b]) => !apart(a, b)).map(([other]) => `${name}|${other}`));
  }),

  // Texts that a box with an overflow cuts off, unless the box shows that it goes on.
  cut: () => {
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
  },

  // What takes the keyboard, one of each kind, by a selector.
  focusable: () => {
    const found = new Map();
    for (const e of document.querySelectorAll('a[href], button, input, select, [tabindex="0"]')) {
      if (e.tabIndex < 0 || !e.checkVisibility()) continue;
      const kind = e.id ? `#${e.id}` : e.name ? `input[name=${e.name}]:checked` : `${e.tagName}.${e.className}`;
      found.set(kind, kind);
    }
    return [...found.keys()];
  },

  // Numbers of blocks that a line of the mask may go through: they touch the middle of the block, and have no halo.
  crossed: () => [...document.querySelectorAll('#matrix .number')].filter((number) => {
    const { x, y, width, height } = number.getBBox();
    const ground = document.querySelector('#matrix .ground').getBBox();
    const side = ground.width / document.querySelectorAll('#matrix [data-place]').length;
    const [left, top] = [x - ground.x, y - ground.y];
    const touches = (start, length) => Math.floor((start * 2) / side) !== Math.floor(((start + length) * 2) / side);
    const style = getComputedStyle(number);
    const hasHalo = style.paintOrder.startsWith('stroke') && parseFloat(style.strokeWidth) >= 2.5;
    return (touches(left, width) || touches(top + 3, height - 6)) && !(hasHalo && side < 40);
  }).map((number) => number.textContent),

  // Lines of grids and axes that go through a text of their picture.
  struck: () => [...document.querySelectorAll('.picture svg')].flatMap((picture) => {
    if (!picture.checkVisibility()) return [];
    const lines = [...picture.querySelectorAll('line.rule, .axis line')].map((line) => line.getBBox());
    const meets = (a, b) =>
      a.x <= b.x + b.width && b.x <= a.x + a.width && a.y <= b.y + b.height && b.y <= a.y + a.height;
    return [...picture.querySelectorAll('text')].filter((text) => lines.some((line) => meets(line, text.getBBox())))
      .map((text) => text.textContent);
  }),

  contrast: (pairs) => {
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
  },

  // The smallest contrast of any HTML text that is not in a picture.
  worstContrast: () => {
    const texts = [...document.querySelectorAll('body *:not(svg *, script, style, option)')].filter((e) =>
      [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility());
    texts.forEach((e, index) => e.setAttribute('data-text', index));
    const found = look.contrast(texts.map((_, index) => [`[data-text="${index}"]`, null]));
    return found.map(([, ratio], index) => [ratio, texts[index].textContent.slice(0, 40)]).sort((a, b) => a[0] - b[0])[0];
  },

  // How much of its card the overview fills: across, and what is left free below it, in pixels.
  filled: () => {
    const card = document.getElementById('overview-card').getBoundingClientRect();
    const boxes = [...document.querySelectorAll('#overview svg, #growth svg')].filter((e) => e.checkVisibility())
      .map((e) => e.getBoundingClientRect());
    const isBeside = boxes.length === 1 || boxes[1].left > boxes[0].right;
    return [boxes.reduce((sum, b) => sum + b.width, 0) / card.width / (isBeside ? 1 : 2),
      card.bottom - Math.min(...boxes.slice(isBeside ? 0 : 1).map((b) => b.bottom))];
  },

  // Colours of what is exposed, in three places, and of what is waiting, in two.
  exposedAndWait: () => ['.pass-row.chosen rect.exposed', '.bar-row[aria-pressed=true] rect.exposed', '.s-exposed',
    '.s-wait', '.span.wait'].map((selector) => getComputedStyle(document.querySelector(selector)))
    .map((style) => style.fill === 'rgb(0, 0, 0)' ? style.backgroundColor : style.fill),

  heightsOfSteps: () => [...document.querySelectorAll('#steps li')].map((e) => e.getBoundingClientRect().height),

  blocks: (state) => [...document.querySelectorAll(`.block.${state}`)].map((b) => [+b.dataset.row, +b.dataset.col]),

  bars: (group) => [...document.querySelectorAll(`.bars:nth-child(${group}) .bar-row`)].map((row) =>
    [row.querySelector('.bar-name').textContent,
      ...['forecast', 'exposed', 'measured'].map((name) => row.querySelector(`.${name}`))
        .map((bar) => bar ? bar.width.baseVal.value : 0)]),

  currentStepIsInSight: () => {
    const list = document.getElementById('steps').getBoundingClientRect();
    const item = document.querySelector('#steps [aria-selected=true]').getBoundingClientRect();
    return item.top >= list.top && item.bottom <= list.bottom;
  },

  middleOf: (selector) => {
    const b = document.querySelector(selector).getBoundingClientRect();
    return [b.x + b.width / 2, b.y + b.height / 2];
  },

  // Controls without a name, and names that are not there.
  nameless: () => [
    ...[...document.querySelectorAll('button, input, select, [tabindex]')].filter((e) => !(e.ariaLabel ||
      (e.labels && e.labels.length) || e.getAttribute('aria-labelledby') || e.textContent.trim())),
    ...[...document.querySelectorAll('[aria-labelledby]')].filter((e) =>
      !document.getElementById(e.getAttribute('aria-labelledby'))),
  ].map((e) => e.outerHTML.slice(0, 80)),

  // HTML texts that are wider than their boxes.
  clipped: () => [...document.querySelectorAll('h1, p, li, .chip span, .bar-row, .bar-name, .bar-value, dd, #where')]
    .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
    .map((e) => e.textContent),

  // Texts that leave their picture.
  outside: () => [...document.querySelectorAll('svg text')].filter((t) => {
    const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
    return a.width && (a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 2 || a.bottom > b.bottom + 2);
  }).map((t) => t.textContent),

  // Controls that are too small for a finger.
  small: () => [...document.querySelectorAll('.chip, button.icon, select, .quiet')].filter((e) => e.checkVisibility())
    .filter((e) => e.getBoundingClientRect().width < 40 || e.getBoundingClientRect().height < 40)
    .map((e) => e.outerHTML.slice(0, 80)),

  isShown: (selector) => document.querySelector(selector).checkVisibility(),
};
