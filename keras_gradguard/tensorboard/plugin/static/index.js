// The GradGuard tab: which layer stopped learning, and when.

import {drawHistogram, drawHistory} from './charts.js';
import {METRICS, decode, isBad, isNone, isZero, plain, power, say} from './codes.js';
import {THEMES, css, rangeOf, viridis} from './colors.js';
import {download, el, get, grouped, option, sized} from './dom.js';
import {HeatMap} from './heatmap.js';
import {card, mainPlace, placesOf, sentence, verdict} from './incidents.js';

const POLL = 5000;

class Page {
  constructor(root) {
    this.root = root;
    this.panes = [];      // [{run, table, series, incidents, picture, map}]
    this.view = null;     // {from, to} in steps, shared by the panes
    this.picked = null;   // {pane, row, step}
    this.asked = 0;
    this.build();
  }

  build() {
    const select = (label, handler, ...options) => {
      const node = el('select', {}, ...options);
      node.addEventListener('change', handler);
      return [node, el('label', {}, label, node)];
    };
    const button = (text, title, handler) => {
      const node = el('button', {type: 'button', textContent: text, title});
      node.setAttribute('aria-label', title);
      node.addEventListener('click', handler);
      return node;
    };
    const reload = () => this.guard(() => this.loadAll(true));
    let labels = [];
    const add = ([node, label]) => { labels.push(label); return node; };
    this.run = add(select('Run', reload));
    this.other = add(select('Compare with', reload));
    this.series = add(select('Optimizer', () => this.guard(() => this.loadAll(true, Number(this.series.value)))));
    this.seriesLabel = labels.at(-1);
    this.metric = add(select('Show', () => this.guard(() => this.loadPictures()),
      ...Object.entries(METRICS).map(([key, m]) => option(key, m.title))));
    this.group = add(select('Rows', () => this.guard(() => this.loadPictures()), option('variable', 'variables'), option('layer', 'layers')));
    this.sort = add(select('Order', () => this.arrange(), option('model', 'as in the model'), option('trouble', 'trouble first')));
    this.filter = el('input', {type: 'search', placeholder: 'name contains…', spellcheck: false});
    this.filter.addEventListener('input', () => this.arrange());
    labels.push(el('label', {}, 'Filter', this.filter));
    this.live = el('input', {type: 'checkbox', checked: true});
    labels.push(el('label', {className: 'check', title: 'Look for new steps every few seconds'}, this.live, 'live'));
    const tools = el('div', {className: 'group'},
      button('◀', 'Earlier steps', () => this.shift(-0.5)), button('▶', 'Later steps', () => this.shift(0.5)),
      button('+', 'Zoom in', () => this.zoom(0.5)), button('−', 'Zoom out', () => this.zoom(2)),
      button('All', 'Show all steps', () => this.reset()));
    const files = el('div', {className: 'group'},
      button('PNG', 'Save the picture as PNG', () => this.png()), button('CSV', 'Save the data shown as CSV', () => this.csv()),
      button('◐', 'Light or dark', () => this.flip()), button('?', 'Keys and colours', () => this.help.showModal()));
    this.headline = el('h1', {textContent: 'Reading the run…'});
    this.more = el('p');
    this.banner = el('div', {className: 'verdict'}, this.headline, this.more);
    this.banner.setAttribute('role', 'status');
    this.legend = el('div', {className: 'legend'});
    this.readout = el('div', {className: 'readout', dataset: {hint: 'Point at a cell to read it, click for its histogram, drag to zoom.'}});
    this.readout.setAttribute('aria-live', 'polite');
    this.error = el('p', {className: 'error'});
    this.error.setAttribute('role', 'alert');
    this.grid = el('div', {className: 'panes'});
    this.detail = el('aside', {className: 'detail'});
    this.cards = el('div', {className: 'cards'});
    this.cardsTitle = el('h2', {className: 'section', textContent: 'Incidents'});
    this.help = this.helpDialog();
    this.root.append(this.banner, el('div', {className: 'bar'}, ...labels, tools, files), this.error, this.legend,
      this.readout, el('div', {className: 'work'}, this.grid, this.detail), this.cardsTitle, this.cards, this.help);
    this.noDetail();
    document.addEventListener('keydown', e => this.key(e));
    let timer, width = 0;
    new ResizeObserver(() => {
      if (this.grid.clientWidth === width) return;
      width = this.grid.clientWidth;
      if (!this.shown) return; // the first picture is on its way
      clearTimeout(timer);
      timer = setTimeout(() => this.guard(() => this.loadPictures()), 150);
    }).observe(this.grid);
    this.watchTheme();
  }

  helpDialog() {
    const rows = [['← → ↑ ↓', 'move the cell cursor (with Shift: ten times as far)'], ['Enter', 'histogram and history of the cell'],
      ['+  −  0', 'zoom in, zoom out, all steps'], ['[  ]', 'earlier, later steps'], ['n  p', 'next, previous incident'],
      ['/', 'filter by name'], ['t', 'trouble first / model order'], ['drag, double click', 'zoom to the range, all steps'],
      ['Shift + drag', 'move along the steps'], ['Ctrl or Shift + wheel', 'zoom at the pointer (plain wheel over the loss strip)']];
    const close = el('button', {type: 'button', textContent: 'Close'});
    const dialog = el('dialog', {}, el('h3', {textContent: 'Keys'}),
      el('table', {}, ...rows.map(([k, what]) => el('tr', {}, el('td', {}, el('code', {textContent: k})), el('td', {textContent: what})))),
      el('p', {textContent: 'Each cell is the largest value of the steps it covers; NaN and Inf always win, and "exactly 0" is shown only where every step is 0.'}), close);
    close.addEventListener('click', () => dialog.close());
    return dialog;
  }

  // ---------------------------------------------------------------- theme

  watchTheme() {
    const read = () => {
      let dark = window.matchMedia('(prefers-color-scheme: dark)').matches && window.parent === window;
      try { dark = dark || window.parent.document.body.classList.contains('dark-mode'); } catch { /* another origin */ }
      return dark ? 'dark' : 'light';
    };
    const set = theme => {
      this.theme = theme;
      document.documentElement.dataset.theme = theme;
      if (this.panes.length) this.arrange();
      if (this.picked) this.showDetail();
    };
    set(read());
    try {
      new MutationObserver(() => { if (read() !== this.theme) set(read()); })
        .observe(window.parent.document.body, {attributes: true, attributeFilter: ['class']});
    } catch { /* another origin: the button is left */ }
    this.flip = () => set(this.theme === 'dark' ? 'light' : 'dark');
  }

  // ---------------------------------------------------------------- loading

  async guard(work) {
    document.body.dataset.state = 'busy';
    try {
      await work();
      this.error.textContent = '';
    } catch (error) {
      this.error.textContent = String(error.message ?? error);
    }
    document.body.dataset.state = 'ready';
  }

  async start() {
    await this.guard(async () => {
      const {runs} = await get('runs', {});
      if (!runs.length) {
        this.headline.textContent = 'No guarded run found here yet';
        this.more.textContent = 'Train with callbacks=[GradientGuard(log_dir="logs")] and point TensorBoard at that directory.';
        return;
      }
      this.fillRuns(runs);
      await this.loadAll(true);
    });
    setInterval(() => this.poll(), POLL);
  }

  fillRuns(runs) {
    if (JSON.stringify(runs) === JSON.stringify(this.runs)) return;
    this.runs = runs;
    const [run, other] = [this.run.value, this.other.value];
    this.run.replaceChildren(...runs.map(r => option(r, r)));
    this.other.replaceChildren(option('', '(nothing)'), ...runs.map(r => option(r, r)));
    if (runs.includes(run)) this.run.value = run;
    if (runs.includes(other)) this.other.value = other;
  }

  async loadAll(fresh, wanted) {
    const names = [this.run.value, this.other.value].filter((r, i) => r && (i === 0 || r !== this.run.value));
    const panes = await Promise.all(names.map(async run => {
      const [table, {incidents}] = await Promise.all([get('table', {run}), get('incidents', {run})]);
      const series = table.series.find(s => s.series === wanted) ?? table.series[0] ?? null;
      return {run, table, series, incidents};
    }));
    if (wanted === undefined) {
      this.series.replaceChildren(...panes[0].table.series.map(s => option(s.series, s.label || s.optimizer)));
    }
    this.seriesLabel.hidden = this.series.options.length < 2;
    const old = this.panes;
    panes.forEach((pane, i) => {
      pane.map = old[i]?.map ?? new HeatMap({
        hover: text => { this.readout.textContent = text; }, pick: (row, step, map) => this.pick(map, row, step),
        move: (a, b) => this.move(a, b), zoom: (f, at) => this.zoom(f, at), reset: () => this.reset(),
      });
    });
    this.panes = panes;
    this.grid.className = panes.length > 1 ? 'panes two' : 'panes';
    this.grid.replaceChildren(...panes.map(p => p.map.node));
    if (fresh) { this.view = null; this.noDetail(); panes.forEach(p => { p.map.cursor = null; }); }
    if (!panes.some(p => p.series)) return this.incidentsOnly();
    await this.loadPictures();
    if (fresh) this.openWorst();
    return undefined;
  }

  span() {
    const spans = this.panes.filter(p => p.series).map(p => p.series.span);
    return {from: Math.min(...spans.map(s => s[0])), to: Math.max(...spans.map(s => s[1]))};
  }

  async loadPictures() {
    if (!this.panes.some(p => p.series)) return;
    const all = this.span(), view = this.view ?? all, turn = ++this.asked;
    const metric = this.metric.value, group = this.group.value;
    const pictures = await Promise.all(this.panes.map(async pane => {
      if (!pane.series) return null;
      const width = Math.max(200, Math.min(2000, Math.round((pane.map.stage.clientWidth || 900) * 0.85)));
      const query = {run: pane.run, series: pane.series.series, metric, group, from: Math.max(0, Math.floor(view.from)), to: Math.ceil(view.to), width};
      return decode(await get('matrix', query, 'buffer'));
    }));
    if (turn !== this.asked) return; // a later question is on its way
    this.panes.forEach((pane, i) => { pane.picture = pictures[i]; });
    this.shown = view;
    this.arrange();
  }

  async poll() {
    if (!this.live.checked || document.hidden || document.body.dataset.state === 'busy') return;
    try {
      const {runs} = await get('runs', {});
      if (!runs.length) return;
      if (!this.runs) return void this.guard(async () => { this.fillRuns(runs); await this.loadAll(true); });
      this.fillRuns(runs);
      const now = await Promise.all(this.panes.map(p => get('table', {run: p.run})));
      const key = t => JSON.stringify([t.incidents, t.series.map(s => [s.series, s.span, s.samples])]);
      if (this.panes.some((p, i) => key(p.table) !== key(now[i]))) {
        const kept = this.panes[0]?.series?.series;
        await this.guard(() => this.loadAll(false, kept));
      }
    } catch { /* the server is away; the next round tries again */ }
  }

  // ---------------------------------------------------------------- arranging

  rowsOf(pane) {
    const byLayer = this.group.value === 'layer', variables = pane.series.variables;
    const names = byLayer ? pane.series.layers : variables.map(v => v.name);
    const rows = names.map((name, index) => ({
      index, name,
      names: byLayer
        ? [name, ...variables.filter(v => v.layer === name).flatMap(v => [v.path, v.name])]
        : [name, variables[index].path, variables[index].layer],
      variables: byLayer ? variables.flatMap((v, i) => (v.layer === name ? [i] : [])) : [index],
    }));
    return rows;
  }

  trouble(pane, row) {
    const p = pane.picture;
    if (!p.columns) return 0;
    let bad = 0, zero = 0, none = 0;
    for (let j = 0; j < p.columns; j++) {
      const code = p.at(row.index, j);
      if (isBad(p.metric, code)) bad++; else if (isZero(p.metric, code)) zero++; else if (isNone(code)) none++;
    }
    const last = p.at(row.index, p.columns - 1);
    return (row.marked ? 10 : 0) + (4 * bad + 3 * zero + none) / p.columns + (isBad(p.metric, last) || isZero(p.metric, last) ? 2 : 0);
  }

  arrange() {
    const shown = this.panes.filter(p => p.picture);
    if (!shown.length) return;
    const range = rangeOf(this.metric.value, shown.map(p => p.picture));
    this.range = range;
    const needle = this.filter.value.trim().toLowerCase();
    for (const pane of shown) {
      const picked = pane.map.cursor && pane.map.rows?.[pane.map.cursor.place];
      let rows = this.rowsOf(pane);
      const mine = pane.incidents.map((incident, i) => ({incident, number: i + 1}))
        .filter(({incident}) => !incident.optimizer || pane.table.series.length < 2 || incident.optimizer === pane.series.optimizer);
      for (const {incident} of mine) {
        if (incident.severity !== 'info') placesOf(incident, rows).forEach(place => { rows[place].marked = true; });
      }
      pane.allRows = rows;
      rows = rows.filter(r => !needle || r.names.some(n => n.toLowerCase().includes(needle)));
      if (this.sort.value === 'trouble') {
        const score = new Map(rows.map(r => [r, this.trouble(pane, r)]));
        rows.sort((a, b) => score.get(b) - score.get(a) || a.index - b.index);
      }
      const {loss} = pane.picture;
      const marks = mine.map(({incident, number}) => ({number, severity: incident.severity,
        step: incident.first_step ?? incident.step, places: placesOf(incident, rows)}));
      const count = needle ? `${rows.length} of ${pane.allRows.length}` : rows.length;
      const pool = pane.picture.pool > 1 ? `, each cell the largest of ${pane.picture.pool}${this.metric.value === 'norm' ? ' steps' : ' samples'}` : '';
      pane.map.show({picture: pane.picture, rows, marks, view: this.shown, range, theme: this.theme,
        loss: {starts: loss.starts, ends: loss.starts.map((_, j) => loss.starts[j + 1] ?? loss.end), loss: loss.values},
        title: `${this.panes.length > 1 ? `${pane.run} · ` : ''}${METRICS[this.metric.value].title}: ${count} ${this.group.value}s × steps ${grouped(this.shown.from)}–${grouped(this.shown.to - 1)}${pool}`});
      if (picked) {
        const place = rows.findIndex(r => r.index === picked.index);
        if (place >= 0) pane.map.cursor.place = place; else pane.map.cursor = null;
        pane.map.drawOverlay();
      }
    }
    this.drawLegend(range);
    this.drawVerdict();
    this.drawCards();
  }

  drawLegend([low, high]) {
    const metric = this.metric.value, colors = THEMES[this.theme];
    const ramp = el('canvas', {className: 'ramp'}), context = sized(ramp, 160, 12);
    for (let i = 0; i < 160; i++) {
      context.fillStyle = css(viridis(i / 159));
      context.fillRect(i, 0, 1, 12);
    }
    const chip = (color, text, hatched) => {
      const box = el('i', {className: hatched ? 'hatched' : ''});
      box.style.backgroundColor = css(color);
      return el('span', {className: 'chip'}, box, text);
    };
    const log = METRICS[metric].log;
    const ends = log ? [power(low / 100), power(high / 100)] : metric === 'zero_fraction' ? ['0 %', '100 %'] : null;
    const rampChip = ends ? [el('span', {className: 'chip'}, ends[0], ramp, ends[1])] : [chip(viridis(0), 'none')];
    const zero = metric === 'nonfinite' ? [] : [chip(colors.zero, metric === 'zero_fraction' ? 'all zero' : 'exactly 0: nothing flows', true)];
    this.legend.replaceChildren(...rampChip, ...zero, chip(colors.bad, 'NaN or Inf'), chip(colors.none, 'None: no path'), chip(colors.missing, 'not recorded'),
      el('span', {className: 'chip'}, '◯ an incident began'));
  }

  drawVerdict() {
    const [pane] = this.panes;
    if (!pane.picture) return;
    const {kind, text, more} = verdict(pane.incidents, pane.allRows, pane.picture);
    this.banner.className = `verdict ${kind}`;
    this.headline.textContent = text;
    this.more.textContent = more;
  }

  drawCards() {
    const all = this.panes.flatMap(pane => pane.incidents.map((incident, i) => ({pane, incident, number: i + 1})));
    this.cardsTitle.textContent = all.length ? `Incidents (${all.length})` : 'Incidents: none';
    const key = JSON.stringify([this.panes.map(p => p.run), all.map(a => a.incident)]);
    if (key === this.cardsKey) return; // an open card stays open
    this.cardsKey = key;
    this.cards.replaceChildren(...this.panes.flatMap(pane => [
      ...(this.panes.length > 1 ? [el('h3', {className: 'run', textContent: pane.run})] : []),
      ...pane.incidents.map((incident, i) => card(incident, i + 1, () => this.guard(() => this.jump(pane.run, i))))]));
  }

  incidentsOnly() {
    const [pane] = this.panes;
    const first = pane.incidents[0];
    this.banner.className = `verdict ${first ? 'bad' : 'calm'}`;
    this.headline.textContent = first ? sentence(first) : 'No gradients recorded yet';
    this.more.textContent = first ? `${first.summary} ${first.fix}` : '';
    this.legend.replaceChildren();
    this.grid.replaceChildren();
    this.drawCards();
  }

  // ---------------------------------------------------------------- moving

  move(from, to) {
    const all = this.span(), width = Math.max(2, Math.min(Math.round(to - from), all.to - all.from));
    const start = Math.round(Math.max(all.from, Math.min(from, all.to - width)));
    this.view = start === all.from && start + width >= all.to ? null : {from: start, to: start + width};
    // The old picture is stretched at once; the sharp one follows.
    this.shown = this.view ?? all;
    this.arrange();
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.guard(() => this.loadPictures()), 60);
    document.body.dataset.state = 'busy';
    if (this.picked) this.showDetail();
  }

  zoom(factor, at) {
    if (!this.shown) return;
    const {from, to} = this.shown, center = at ?? (this.picked && this.picked.step >= from && this.picked.step < to ? this.picked.step + 0.5 : (from + to) / 2);
    this.move(center - (center - from) * factor, center + (to - center) * factor);
  }

  shift(part) {
    if (!this.shown) return;
    const by = (this.shown.to - this.shown.from) * part;
    this.move(this.shown.from + by, this.shown.to + by);
  }

  reset() {
    if (!this.shown) return;
    const all = this.span();
    this.move(all.from, all.to);
  }

  key(event) {
    if (event.target.closest?.('input, select, dialog') || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2), 0: () => this.reset(),
      '[': () => this.shift(-0.5), ']': () => this.shift(0.5), n: () => this.nextIncident(1), p: () => this.nextIncident(-1),
      '/': () => this.filter.focus(), '?': () => this.help.showModal(),
      t: () => { this.sort.value = this.sort.value === 'trouble' ? 'model' : 'trouble'; this.arrange(); },
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  nextIncident(by) {
    const {incidents, run} = this.panes[0];
    if (!incidents.length) return;
    this.current = ((this.current ?? (by > 0 ? -1 : 0)) + by + incidents.length) % incidents.length;
    this.guard(() => this.jump(run, this.current));
  }

  openWorst() {
    const [pane] = this.panes;
    const index = pane.incidents.findIndex(i => i.severity === 'raise');
    const incident = pane.incidents[index >= 0 ? index : 0];
    if (!incident || !pane.map.rows) return;
    const place = mainPlace(incident, pane.map.rows);
    if (place >= 0) pane.map.pick(place, incident.step ?? pane.series.span[1] - 1);
  }

  /** Show an incident's place: its series, its rows, the steps around its beginning. */
  async jump(run, index) {
    const incident = this.panes.find(p => p.run === run).incidents[index];
    let pane = this.panes.find(p => p.run === run);
    this.filter.value = '';
    const home = pane.table.series.find(s => s.optimizer === incident.optimizer);
    if (home && home !== pane.series) {
      this.series.value = String(home.series);
      await this.loadAll(true, home.series);
      pane = this.panes.find(p => p.run === run);
    }
    const last = incident.step ?? incident.first_step;
    if (!pane.series || last === null) return;
    const first = incident.first_step ?? last, room = Math.max(20, last - first);
    const all = this.span();
    const from = Math.max(all.from, first - room), to = Math.min(all.to, last + room + 1);
    this.view = to - from < all.to - all.from ? {from, to} : null;
    this.metric.value = 'norm'; // the only one that is known at every step
    await this.loadPictures();
    const place = mainPlace(incident, pane.map.rows);
    if (place >= 0) {
      pane.map.scroll.scrollTop = Math.max(0, (place - 4) * pane.map.rowHeight);
      pane.map.pick(place, Math.min(last, all.to - 1));
    }
    pane.map.node.scrollIntoView({block: 'nearest'});
    pane.map.canvas.focus({preventScroll: true});
  }

  // ---------------------------------------------------------------- details

  noDetail() {
    this.picked = null;
    this.detail.replaceChildren(el('h2', {textContent: 'Details'}),
      el('p', {className: 'empty', textContent: 'Click a cell, or move to it with the arrow keys and press Enter, to see the histogram of its gradient and the history of its norm.'}));
  }

  pick(map, row, step) {
    const pane = this.panes.find(p => p.map === map);
    for (const other of this.panes) if (other !== pane) { other.map.cursor = null; other.map.drawOverlay(); }
    // Of a layer the largest variable is shown: it carries most of what is to be seen.
    const size = i => pane.series.variables[i].shape.reduce((a, b) => a * b, 1);
    const variable = row.variables.reduce((a, b) => (size(b) > size(a) ? b : a));
    this.picked = {pane, row, step, variable};
    this.showDetail();
  }

  async showDetail() {
    const {pane, variable, step} = this.picked, turn = (this.turn = (this.turn ?? 0) + 1);
    const {from, to} = this.shown;
    let cell;
    try {
      cell = await get('cell', {run: pane.run, series: pane.series.series, variable, step, from: Math.floor(from), to: Math.ceil(to)});
    } catch (error) {
      this.error.textContent = String(error.message ?? error);
      return;
    }
    if (turn !== this.turn) return;
    const histogram = el('canvas'), history = el('canvas');
    const {sample, row} = cell;
    const number = v => (typeof v !== 'number' ? (v === 'nan' ? '–' : String(v)) : v === 0 ? '0' : power(Math.log10(Math.abs(v))));
    const facts = [];
    if (row) facts.push([`norm at step ${grouped(row.step)}`, say('norm', row.code)]);
    if (sample) {
      facts.push(['zeros', typeof sample.zero_fraction === 'number' ? `${(100 * sample.zero_fraction).toFixed(1)} %` : '–'],
        ['NaN and Inf', number(sample.nonfinite)], ['largest |g|', number(sample.max_abs)],
        ['update ratio', number(sample.update_ratio)], ['|weights|', number(sample.weight)]);
    }
    const at = cell.histogram ? `Gradient entries at step ${grouped(cell.histogram.step)} (the nearest sample)` : 'No histogram was recorded';
    const shape = cell.shape.length ? cell.shape.join(' × ') : 'scalar';
    this.detail.replaceChildren(el('h2', {textContent: cell.name}),
      el('div', {className: 'empty', textContent: `layer ${cell.layer} · ${shape} · ${cell.dtype}`}),
      el('dl', {}, ...facts.flatMap(([k, v]) => [el('dt', {textContent: k}), el('dd', {textContent: v})])),
      el('h4', {textContent: at}), el('div', {}, histogram), el('h4', {textContent: 'Norm over the steps shown'}), el('div', {}, history));
    if (cell.histogram) drawHistogram(histogram, cell.histogram.buckets, this.theme); else histogram.hidden = true;
    drawHistory(history, cell.history, this.shown, step, this.theme);
    this.detail.dataset.cell = `${cell.name}@${step}`;
  }

  // ---------------------------------------------------------------- files

  png() {
    const panes = this.panes.filter(p => p.picture), ratio = window.devicePixelRatio || 1;
    if (!panes.length) return;
    const gap = 16 * ratio, head = 54 * ratio;
    const width = panes.reduce((sum, p) => sum + p.map.canvas.width + gap, gap);
    const height = head + Math.max(...panes.map(p => p.map.canvas.height + p.map.strip.height)) + 2 * gap;
    const canvas = el('canvas', {width, height}), context = canvas.getContext('2d'), colors = THEMES[this.theme];
    context.fillStyle = colors.page;
    context.fillRect(0, 0, width, height);
    context.fillStyle = colors.ink;
    context.font = `600 ${15 * ratio}px system-ui, sans-serif`;
    context.fillText(this.headline.textContent, gap, 24 * ratio, width - 2 * gap);
    context.font = `${12 * ratio}px system-ui, sans-serif`;
    let x = gap;
    for (const {map} of panes) {
      context.fillText(map.title, x, 45 * ratio, map.canvas.width);
      context.drawImage(map.strip, x, head);
      context.drawImage(map.still, x, head + map.strip.height);
      x += map.canvas.width + gap;
    }
    canvas.toBlob(blob => download(blob, 'gradguard.png'));
  }

  csv() {
    const quote = text => {
      // A leading =, +, - or @ would be run as a formula by a spreadsheet.
      const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
      return `"${safe.replaceAll('"', '""')}"`;
    };
    const metric = this.metric.value;
    const value = code => {
      if (isNone(code)) return 'none';
      if (!plain(code)) return {32767: 'nan', 32766: 'inf', '-32766': '0'}[code] ?? '';
      return METRICS[metric].log ? (10 ** (code / 100)).toPrecision(4) : metric === 'zero_fraction' ? String(code / 10000) : String(code);
    };
    const lines = [];
    for (const pane of this.panes.filter(p => p.picture)) {
      const {rows} = pane.map, p = pane.picture;
      lines.push(['run', 'first_step', 'last_step', ...rows.map(r => quote(r.name))].join(','));
      for (let j = 0; j < p.columns; j++) {
        lines.push([quote(pane.run), p.starts[j], p.endOf(j) - 1, ...rows.map(r => value(p.at(r.index, j)))].join(','));
      }
    }
    download(new Blob([`${lines.join('\n')}\n`], {type: 'text/csv'}), `gradguard_${metric}.csv`);
  }
}

export async function render() {
  const style = el('link', {rel: 'stylesheet', href: './style.css'});
  // Sizes are measured for the first picture: the styles have to be there.
  await new Promise(done => {
    style.onload = style.onerror = done;
    document.head.append(style);
  });
  const root = el('main');
  document.body.append(root);
  await new Page(root).start();
}
