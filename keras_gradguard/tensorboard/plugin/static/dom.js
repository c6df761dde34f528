// Small helpers. Text from the outside goes through textContent only; nothing is parsed as HTML.

export const el = (tag, properties = {}, ...children) => {
  const {dataset, ...rest} = properties;
  const node = Object.assign(document.createElement(tag), rest);
  if (dataset) Object.assign(node.dataset, dataset);
  node.append(...children.filter(c => c !== null && c !== undefined));
  return node;
};

export const option = (value, text) => el('option', {value: String(value), textContent: text});

/** Give a canvas a size in CSS pixels and return its context, scaled for the display. */
export const sized = (canvas, width, height) => {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
};

/** Round steps for an axis with about `count` ticks, whole numbers. */
export const ticks = (from, to, count) => {
  const rough = Math.max((to - from) / Math.max(count, 1), 1);
  const base = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map(m => m * base).find(u => u >= rough);
  const found = [];
  for (let t = Math.ceil(from / unit) * unit; t < to; t += unit) found.push(t);
  return found;
};

export const grouped = n => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f');

/** Cut a text from the left so that it fits; the end of a variable's path says most. */
export const fitted = (context, text, width) => {
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText('…' + text.slice(middle)).width <= width) high = middle; else low = middle + 1;
  }
  return '…' + text.slice(low);
};

export const download = (blob, name) => {
  const link = el('a', {href: URL.createObjectURL(blob), download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

export const get = async (path, query, kind = 'json') => {
  const response = await fetch(`./${path}?${new URLSearchParams(query)}`);
  if (!response.ok) throw new Error((await response.text()).slice(0, 300));
  return kind === 'json' ? response.json() : response.arrayBuffer();
};
