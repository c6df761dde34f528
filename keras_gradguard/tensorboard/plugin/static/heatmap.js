// One run's map: a strip on top (loss, steps, incident flags), below it variables × steps.

import {isBad, isNone, isZero, say} from './codes.js';
import {THEMES, css, painter} from './colors.js';
import {el, fitted, grouped, sized, ticks} from './dom.js';

const STRIP = 86, FONT = '12px system-ui, sans-serif', MOST = 12000;

export class HeatMap {
  /** `on` holds the page's handlers: hover, pick, zoom, pan, reset. */
  constructor(on) {
    this.on = on;
    this.strip = el('canvas', {className: 'strip'});
    this.canvas = el('canvas', {className: 'map', tabIndex: 0});
    this.canvas.setAttribute('role', 'application');
    this.brush = el('div', {className: 'brush', hidden: true});
    this.heading = el('div', {className: 'pane-title'});
    this.scroll = el('div', {className: 'scroll'}, this.canvas);
    this.stage = el('div', {className: 'stage'}, this.strip, this.scroll, this.brush);
    this.node = el('section', {className: 'pane'}, this.heading, this.stage);
    this.cursor = null;
    for (const c of [this.canvas, this.strip]) this.listen(c);
    this.canvas.addEventListener('keydown', e => this.key(e));
    this.canvas.addEventListener('blur', () => this.drawOverlay());
    this.canvas.addEventListener('focus', () => {
      if (!this.cursor && this.rows.length) this.cursor = {place: 0, step: Math.floor(this.view.to) - 1};
      this.drawOverlay();
    });
  }

  /** Show a picture. `data`: {picture, rows: [{index, name}], marks, view, range, theme, title, loss}. */
  show(data) {
    Object.assign(this, data);
    this.heading.textContent = data.title;
    this.draw();
  }

  get plotWidth() { return this.width - this.gutter - 6; }
  x(step) { return this.gutter + ((step - this.view.from) / (this.view.to - this.view.from)) * this.plotWidth; }
  stepAt(x) { return this.view.from + ((x - this.gutter) / this.plotWidth) * (this.view.to - this.view.from); }

  draw() {
    this.width = Math.max(260, this.scroll.clientWidth - 2);
    const count = Math.max(this.rows.length, 1);
    this.rowHeight = Math.min(30, Math.max(5, Math.floor(430 / count)));
    this.rowHeight = Math.max(1, Math.min(this.rowHeight, Math.floor(MOST / count)));
    this.height = this.rowHeight * count;
    const probe = this.canvas.getContext('2d');
    probe.font = `600 ${FONT}`;
    const longest = Math.max(...this.rows.map(r => probe.measureText(r.name).width), 40);
    this.gutter = Math.ceil(Math.min(longest + 14, 230, this.width * 0.32));
    this.drawStrip();
    this.drawCells();
  }

  drawCells() {
    const context = sized(this.canvas, this.width, this.height), colors = THEMES[this.theme];
    context.clearRect(0, 0, this.width, this.height);
    const {picture: p, rows, rowHeight: h} = this;
    this.canvas.setAttribute('aria-label',
      `${this.title}: ${rows.length} rows over steps ${this.view.from} to ${this.view.to}. ` +
      'Arrow keys move, Enter opens details.');
    const paint = painter(p.metric, this.range, this.theme);
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.plotWidth, this.height);
    context.clip();
    if (p.columns && rows.length) {
      const image = new ImageData(p.columns, rows.length), data = new Uint32Array(image.data.buffer);
      const memo = new Map();
      rows.forEach((row, i) => {
        for (let j = 0; j < p.columns; j++) {
          const code = p.at(row.index, j);
          let color = memo.get(code);
          if (color === undefined) {
            const [r, g, b] = paint(code);
            color = (255 << 24) | (b << 16) | (g << 8) | r;
            memo.set(code, color);
          }
          data[i * p.columns + j] = color;
        }
      });
      const off = new OffscreenCanvas(p.columns, rows.length);
      off.getContext('2d').putImageData(image, 0, 0);
      context.imageSmoothingEnabled = false;
      // Columns of equal width are drawn in one go.
      for (let a = 0; a < p.columns;) {
        const w = p.endOf(a) - p.starts[a];
        let b = a + 1;
        while (b < p.columns && p.endOf(b) - p.starts[b] === w) b++;
        const left = this.x(p.starts[a]), right = this.x(p.endOf(b - 1));
        context.drawImage(off, a, 0, b - a, rows.length, left, 0, right - left, this.height);
        a = b;
      }
      this.hatch(context, paint);
      if (h >= 9) {
        context.strokeStyle = colors.page;
        context.lineWidth = 1;
        for (let i = 1; i < rows.length; i++) {
          context.beginPath();
          context.moveTo(this.gutter, i * h);
          context.lineTo(this.width, i * h);
          context.stroke();
        }
      }
    }
    context.restore();
    this.drawLabels(context, colors);
    this.drawMarks(context, colors);
    this.still = document.createElement('canvas');
    this.still.width = this.canvas.width;
    this.still.height = this.canvas.height;
    this.still.getContext('2d').drawImage(this.canvas, 0, 0);
    this.canvas.dataset.geometry = JSON.stringify({gutter: this.gutter, plot: this.plotWidth,
      row: h, view: this.view, rows: rows.map(r => r.name)});
    this.drawOverlay();
  }

  /** Diagonal lines over zeros, crosses over NaN: the colours are not the only sign. */
  hatch(context) {
    const {picture: p, rows, rowHeight: h} = this;
    if (h < 6) return;
    const pattern = (lines, color) => {
      const tile = new OffscreenCanvas(8, 8), c = tile.getContext('2d');
      c.strokeStyle = color;
      c.lineWidth = 1.4;
      for (const [x1, y1, x2, y2] of lines) {
        c.beginPath();
        c.moveTo(x1, y1);
        c.lineTo(x2, y2);
        c.stroke();
      }
      return context.createPattern(tile, 'repeat');
    };
    const rising = [[-1, 9, 9, -1], [-5, 5, 5, -5], [3, 13, 13, 3]];
    const falling = [[-1, -1, 9, 9]];
    const zero = pattern(rising, 'rgba(255,255,255,.45)');
    const bad = pattern([...rising.slice(0, 1), ...falling], this.theme === 'dark' ? 'rgba(0,0,0,.5)' : 'rgba(255,255,255,.6)');
    rows.forEach((row, i) => {
      for (let j = 0; j < p.columns;) {
        const kind = code => (isBad(p.metric, code) ? bad : isZero(p.metric, code) ? zero : null);
        const fill = kind(p.at(row.index, j));
        let k = j + 1;
        while (k < p.columns && kind(p.at(row.index, k)) === fill) k++;
        if (fill) {
          context.fillStyle = fill;
          context.fillRect(this.x(p.starts[j]), i * h, this.x(p.endOf(k - 1)) - this.x(p.starts[j]), h);
        }
        j = k;
      }
    });
  }

  drawLabels(context, colors) {
    const {rows, rowHeight: h} = this;
    context.font = h >= 13 ? FONT : '10px system-ui, sans-serif';
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    const every = Math.ceil((h >= 13 ? 13 : 11) / h);
    rows.forEach((row, i) => {
      if (i % every && !row.marked) return;
      context.fillStyle = row.marked ? css(colors.zero) : colors.ink;
      context.font = `${row.marked ? '600 ' : ''}${h >= 13 ? 12 : 10}px system-ui, sans-serif`;
      if (row.marked && h < 11 && i % every) return;
      context.fillText(fitted(context, row.name, this.gutter - 10), this.gutter - 7, Math.max(i * h + h / 2, 6));
    });
    context.textBaseline = 'alphabetic';
  }

  /** A ring where an incident began, on each of its rows. */
  drawMarks(context, colors) {
    for (const mark of this.marks) {
      if (mark.step === null) continue;
      const x = Math.max(this.gutter + 7, this.x(mark.step));
      if (x < this.gutter || x > this.width) continue;
      for (const place of mark.places) {
        const y = place * this.rowHeight + this.rowHeight / 2;
        context.lineWidth = 4;
        context.strokeStyle = colors.page;
        context.beginPath();
        context.arc(x, y, 6, 0, 7);
        context.stroke();
        context.lineWidth = 2;
        context.strokeStyle = colors.ink;
        context.beginPath();
        context.arc(x, y, 6, 0, 7);
        context.stroke();
      }
    }
  }

  drawStrip() {
    const context = sized(this.strip, this.width, STRIP), colors = THEMES[this.theme];
    context.clearRect(0, 0, this.width, STRIP);
    context.font = '11px system-ui, sans-serif';
    const top = 22, bottom = 62, {starts, ends, loss} = this.loss;
    const known = loss.filter(v => v !== null);
    context.textAlign = 'right';
    context.fillStyle = colors.faint;
    if (known.length) {
      let low = Math.min(...known), high = Math.max(...known);
      const log = low > 0 && high / low > 50;
      const f = log ? Math.log10 : v => v;
      if (high === low) high = low + Math.abs(low || 1);
      const y = v => bottom - ((f(v) - f(low)) / (f(high) - f(low))) * (bottom - top);
      context.fillText('loss', this.gutter - 8, (top + bottom) / 2 + 4);
      context.fillText(high.toPrecision(3), this.gutter - 8, top + 6);
      context.fillText(low.toPrecision(3), this.gutter - 8, bottom);
      context.save();
      context.beginPath();
      context.rect(this.gutter, 0, this.plotWidth, STRIP);
      context.clip();
      context.strokeStyle = colors.faint;
      context.lineWidth = 1.4;
      context.beginPath();
      let drawing = false;
      loss.forEach((v, j) => {
        if (v === null) { drawing = false; return; }
        const x = this.x((starts[j] + ends[j]) / 2);
        if (drawing) context.lineTo(x, y(v)); else context.moveTo(x, y(v));
        drawing = true;
      });
      context.stroke();
      context.restore();
    }
    context.strokeStyle = colors.line;
    context.lineWidth = 1;
    context.textAlign = 'center';
    context.fillStyle = colors.ink;
    for (const t of ticks(this.view.from, this.view.to, this.plotWidth / 90)) {
      const x = this.x(t);
      context.beginPath();
      context.moveTo(x, STRIP - 5);
      context.lineTo(x, STRIP);
      context.stroke();
      context.fillText(grouped(t), Math.min(Math.max(x, this.gutter + 10), this.width - 18), STRIP - 9);
    }
    context.textAlign = 'right';
    context.fillStyle = colors.faint;
    context.fillText('step', this.gutter - 8, STRIP - 9);
    let taken = -Infinity;
    for (const mark of [...this.marks].sort((a, b) => a.step - b.step)) taken = this.flag(context, colors, mark, taken);
  }

  /** Draw one flag, not over the one before it, which ends at `taken`; return its own end. */
  flag(context, colors, mark, taken) {
    const x = mark.step === null ? -1 : this.x(mark.step);
    if (x < this.gutter - 1 || x > this.width) return taken;
    const color = mark.severity === 'raise' ? css(colors.zero) : mark.severity === 'warn' ? '#b35900' : colors.faint;
    context.strokeStyle = color;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, 16);
    context.lineTo(x, STRIP);
    context.stroke();
    context.setLineDash([]);
    const text = `#${mark.number}`, w = context.measureText(text).width + 10;
    const left = Math.min(Math.max(x, this.gutter, taken + 2), this.width - w);
    context.fillStyle = color;
    context.fillRect(left, 0, w, 16);
    context.fillStyle = '#ffffff';
    context.textAlign = 'left';
    context.fillText(text, left + 5, 12);
    return left + w;
  }

  /** Redraw the finished map and the cursor on it. */
  drawOverlay() {
    if (!this.still) return;
    const context = this.canvas.getContext('2d');
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.still, 0, 0);
    context.restore();
    if (!this.cursor || this.cursor.place >= this.rows.length) return;
    const h = this.rowHeight, column = this.picture.columnAt(this.cursor.step);
    const a = this.x(column < 0 ? this.cursor.step : this.picture.starts[column]);
    const b = this.x(column < 0 ? this.cursor.step + 1 : this.picture.endOf(column));
    const middle = (a + b) / 2, half = Math.max(3, (b - a) / 2);
    const left = Math.max(this.gutter, middle - half), right = Math.min(this.gutter + this.plotWidth, middle + half);
    if (right <= left) return;
    for (const [color, line] of [[THEMES[this.theme].page, 4], [THEMES[this.theme].accent, 2]]) {
      context.strokeStyle = color;
      context.lineWidth = line;
      context.strokeRect(left, this.cursor.place * h, right - left, h);
    }
  }

  /** Text for a cell, as the readout line says it. */
  describe(place, step) {
    const row = this.rows[place];
    if (!row) return '';
    const column = this.picture.columnAt(step);
    if (column < 0) return `${row.name} · step ${grouped(step)} · nothing recorded`;
    const first = this.picture.starts[column], last = this.picture.endOf(column) - 1;
    const steps = first === last ? `step ${grouped(first)}` : `steps ${grouped(first)}–${grouped(last)}`;
    const code = this.picture.at(row.index, column);
    const peak = this.picture.pool > 1 && !isNone(code) ? ` (largest of ${this.picture.pool})` : '';
    return `${row.name} · ${steps} · ${say(this.picture.metric, code)}${peak}`;
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const place = Math.floor((event.clientY - box.top) / this.rowHeight);
    return {place, step: Math.floor(this.stepAt(event.clientX - box.left))};
  }

  inside({place, step}) {
    return place >= 0 && place < this.rows.length && step >= this.view.from && step < this.view.to;
  }

  listen(canvas) {
    let start = null;
    canvas.addEventListener('pointerdown', e => {
      if (e.button) return;
      canvas.setPointerCapture(e.pointerId);
      start = {x: e.offsetX, view: {...this.view}, pan: e.shiftKey};
    });
    canvas.addEventListener('pointermove', e => {
      if (start && Math.abs(e.offsetX - start.x) > 4) {
        if (start.pan) {
          const steps = ((start.x - e.offsetX) / this.plotWidth) * (start.view.to - start.view.from);
          this.on.move(start.view.from + steps, start.view.to + steps);
        } else {
          const [a, b] = [start.x, e.offsetX].sort((p, q) => p - q);
          this.brush.hidden = false;
          this.brush.style.left = `${Math.max(a, this.gutter)}px`;
          this.brush.style.width = `${Math.min(b, this.width) - Math.max(a, this.gutter)}px`;
        }
      } else if (canvas === this.canvas) {
        const at = this.place(e);
        canvas.title = '';
        this.on.hover(this.inside(at) ? this.describe(at.place, at.step) : '', this);
      }
    });
    canvas.addEventListener('pointerleave', () => this.on.hover('', this));
    canvas.addEventListener('pointerup', e => {
      if (!start) return;
      const {x, pan} = start, dragged = Math.abs(e.offsetX - x) > 4;
      start = null;
      this.brush.hidden = true;
      if (dragged && !pan) {
        const [a, b] = [this.stepAt(x), this.stepAt(e.offsetX)].sort((p, q) => p - q);
        this.on.move(Math.floor(a), Math.ceil(b));
      } else if (!dragged && canvas === this.canvas) {
        const at = this.place(e);
        if (at.place >= 0 && at.place < this.rows.length) this.pick(at.place, at.step);
      }
    });
    canvas.addEventListener('dblclick', () => this.on.reset());
    canvas.addEventListener('wheel', e => {
      if (canvas === this.canvas && !e.ctrlKey && !e.shiftKey) return; // plain wheel scrolls
      e.preventDefault();
      this.on.zoom(e.deltaY + e.deltaX > 0 ? 1.4 : 1 / 1.4, this.stepAt(e.offsetX));
    }, {passive: false});
  }

  pick(place, step) {
    this.cursor = {place, step: Math.max(Math.ceil(this.view.from), Math.min(step, Math.ceil(this.view.to) - 1))};
    this.drawOverlay();
    this.on.pick(this.rows[place], this.cursor.step, this);
  }

  key(event) {
    const c = this.cursor ?? {place: 0, step: Math.floor(this.view.from)};
    const column = this.picture.columnAt(c.step);
    const jump = event.shiftKey ? Math.max(1, Math.round(this.picture.columns / 10)) : 1;
    const aside = by => {
      const next = Math.max(0, Math.min(this.picture.columns - 1, (column < 0 ? 0 : column) + by));
      return this.picture.columns ? this.picture.starts[next] : c.step;
    };
    const moves = {
      ArrowUp: () => ({...c, place: Math.max(0, c.place - jump)}),
      ArrowDown: () => ({...c, place: Math.min(this.rows.length - 1, c.place + jump)}),
      ArrowLeft: () => ({...c, step: aside(-jump)}),
      ArrowRight: () => ({...c, step: aside(jump)}),
      Home: () => ({...c, step: aside(-1e9)}),
      End: () => ({...c, step: aside(1e9)}),
    };
    if (event.key in moves) {
      this.cursor = moves[event.key]();
      this.drawOverlay();
      this.on.hover(this.describe(this.cursor.place, this.cursor.step), this);
      const top = this.cursor.place * this.rowHeight;
      if (top < this.scroll.scrollTop) this.scroll.scrollTop = top;
      if (top + this.rowHeight > this.scroll.scrollTop + this.scroll.clientHeight) this.scroll.scrollTop = top + this.rowHeight - this.scroll.clientHeight;
    } else if (event.key === 'Enter' || event.key === ' ') {
      this.pick(c.place, c.step);
    } else {
      return;
    }
    event.preventDefault();
  }
}
