// The two small charts of the detail panel.

import {INF, NONE, ZERO, plain} from './codes.js';
import {THEMES, css} from './colors.js';
import {grouped, sized, ticks} from './dom.js';

const FONT = '11px system-ui, sans-serif';
const SUPER = {'-': '⁻', 0: '⁰', 1: '¹', 2: '²', 3: '³', 4: '⁴', 5: '⁵', 6: '⁶', 7: '⁷', 8: '⁸', 9: '⁹'};
const ten = e => '10' + [...String(e)].map(c => SUPER[c]).join('');

const decades = (low, high, most) => {
  const stride = Math.max(1, Math.ceil((high - low) / most));
  const found = [];
  for (let d = Math.ceil(low / stride) * stride; d <= high; d += stride) found.push(d);
  return found;
};

/** Histogram on the log10|g| axis; the zero bucket stands apart, on the left, in its own colour. */
export const drawHistogram = (canvas, buckets, theme) => {
  const width = canvas.parentElement.clientWidth || 320, height = 170;
  const context = sized(canvas, width, height), colors = THEMES[theme];
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  const zero = buckets.length && buckets[0][0] < -18.5 ? buckets[0][2] : 0;
  const rest = buckets.filter(b => b[0] >= -18.5 && b[2] > 0);
  const total = buckets.reduce((sum, b) => sum + b[2], 0);
  const top = Math.max(zero, ...rest.map(b => b[2]), 1);
  const base = height - 30, gap = 66, left = zero ? gap : 8, scale = base - 22;
  const low = Math.min(...rest.map(b => b[0]), rest.length ? Infinity : -6) - 0.3;
  const high = Math.max(...rest.map(b => b[1]), rest.length ? -Infinity : 0) + 0.3;
  const x = v => left + ((v - low) / (high - low)) * (width - left - 8);
  context.strokeStyle = colors.line;
  context.beginPath();
  context.moveTo(0, base + 0.5);
  context.lineTo(width, base + 0.5);
  context.stroke();
  if (zero) {
    const h = Math.max(2, (zero / top) * scale);
    context.fillStyle = css(colors.zero);
    context.fillRect(14, base - h, 34, h);
    context.fillStyle = colors.ink;
    context.textAlign = 'center';
    context.fillText(`${((100 * zero) / total).toFixed(zero === total ? 0 : 1)} %`, 31, base - h - 5);
    context.fillText('exact 0', 31, base + 14);
  }
  if (!total) {
    context.fillStyle = colors.faint;
    context.textAlign = 'center';
    context.fillText('every entry is NaN or Inf', width / 2, base / 2);
    return;
  }
  context.fillStyle = theme === 'dark' ? '#4aa7a0' : '#2b7a78';
  for (const [a, b, count] of rest) {
    const h = Math.max(1, (count / top) * scale);
    context.fillRect(x(a), base - h, Math.max(1, x(b) - x(a) - 1), h);
  }
  context.fillStyle = colors.ink;
  context.textAlign = 'center';
  if (rest.length) for (const d of decades(low, high, Math.max(2, (width - left) / 52))) context.fillText(ten(d), x(d), base + 14);
  context.textAlign = 'right';
  context.fillStyle = colors.faint;
  context.fillText('|gradient entry|', width - 4, base + 27);
};

/** The norm over steps: a band from smallest to largest, marks for zero, None and NaN. */
export const drawHistory = (canvas, history, view, step, theme) => {
  const width = canvas.parentElement.clientWidth || 320, height = 150;
  const context = sized(canvas, width, height), colors = THEMES[theme];
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  const {starts, high, low, end} = history;
  const values = [...high, ...low].filter(plain).map(c => c / 100);
  let bottom = Math.floor(values.length ? Math.min(...values) : -6), top = Math.ceil(values.length ? Math.max(...values) : 0);
  if (top - bottom < 1) top = bottom + 1;
  const left = 40, base = height - 34, from = view.from, to = view.to;
  const x = s => left + ((s - from) / (to - from)) * (width - left - 8);
  const y = c => base - ((c - bottom) / (top - bottom)) * (base - 10);
  context.textAlign = 'right';
  for (const d of decades(bottom, top, 5)) {
    context.strokeStyle = colors.line;
    context.beginPath();
    context.moveTo(left, y(d) + 0.5);
    context.lineTo(width, y(d) + 0.5);
    context.stroke();
    context.fillStyle = colors.faint;
    context.fillText(ten(d), left - 5, y(d) + 4);
  }
  const line = theme === 'dark' ? '#4aa7a0' : '#2b7a78';
  context.strokeStyle = line;
  context.lineWidth = 1.3;
  context.beginPath();
  let drawing = false;
  high.forEach((code, j) => {
    if (!plain(code)) { drawing = false; return; }
    const at = [x((starts[j] + (starts[j + 1] ?? end)) / 2), y(code / 100)];
    if (drawing) context.lineTo(...at); else context.moveTo(...at);
    drawing = true;
  });
  context.stroke();
  for (let j = 0; j < starts.length; j++) {
    const a = x(starts[j]), b = x(j + 1 < starts.length ? starts[j + 1] : end), w = Math.max(1, b - a);
    if (plain(high[j])) {
      const t = y(high[j] / 100), l = plain(low[j]) ? y(low[j] / 100) : base;
      context.fillStyle = line;
      if (l - t > 2) context.fillRect(a, t, w, l - t);
    }
    if (high[j] === ZERO || high[j] >= INF || high[j] === NONE) {
      context.fillStyle = css(high[j] >= INF ? colors.bad : high[j] === NONE ? colors.none : colors.zero);
      context.fillRect(a, base + 2, w, 6);
    }
  }
  context.fillStyle = colors.faint;
  context.textAlign = 'center';
  for (const t of ticks(from, to, width / 90)) context.fillText(grouped(t), Math.max(left + 8, x(t)), height - 4);
  context.strokeStyle = colors.accent;
  context.beginPath();
  context.moveTo(x(step + 0.5), 4);
  context.lineTo(x(step + 0.5), base + 8);
  context.stroke();
};
