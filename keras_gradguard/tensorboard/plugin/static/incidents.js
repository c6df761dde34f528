// Incidents as cards, and the one sentence on top of the page.

import {isBad, isZero} from './codes.js';
import {el, grouped} from './dom.js';

/** Places (row numbers) that an incident speaks of. A name may be a variable or a layer. */
export const placesOf = (incident, rows) => rows.flatMap((row, place) => {
  const hit = incident.where.some(w => w && row.names.some(n => n === w || n.startsWith(`${w}/`)));
  return hit ? [place] : [];
});

/** The row of the name that the incident puts first, or -1. */
export const mainPlace = (incident, rows) => {
  for (const w of incident.where) {
    const place = placesOf({where: [w]}, rows)[0];
    if (place !== undefined) return place;
  }
  return -1;
};

const since = i => {
  if (i.step === null) return '';
  const first = i.first_step ?? i.step;
  return first === i.step ? `at step ${grouped(i.step)}` : `since step ${grouped(first)}, found at step ${grouped(i.step)}`;
};

const PHRASES = {
  none_gradient: 'no gradient (None)', zero_gradient: 'gradient is exactly zero', zero_update: 'weights do not change',
  non_finite: 'NaN or Inf', vanishing: 'gradient vanishes', exploding: 'gradient explodes',
  bad_contract: 'model, loss and data do not fit together',
};

// The first name is where it began; a long list would hide it.
const brief = names => (names.length > 3 ? `${names[0]} and ${names.length - 1} more` : names.join(', '));

/** An incident in a few words: where, what, since when. */
export const sentence = incident => {
  const first = incident.first_step ?? incident.step;
  const what = PHRASES[incident.symptom] ?? incident.title;
  return `${brief(incident.where) || 'model'}: ${what}${first === null ? '' : ` since step ${grouped(first)}`}`;
};

/** The sentence that says what is wrong, or that nothing is: {kind, text, more}. */
export const verdict = (incidents, rows, picture) => {
  const order = ['raise', 'warn'];
  const worst = incidents.filter(i => order.includes(i.severity))
    .sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity))[0];
  if (worst) {
    const cause = worst.causes[0];
    return {
      kind: worst.severity === 'raise' ? 'bad' : 'warn',
      text: sentence(worst),
      more: [cause && cause.name !== 'unknown' ? `Why: ${cause.meaning || cause.name}.` : worst.summary, worst.fix && `Fix: ${worst.fix}`].filter(Boolean).join(' '),
    };
  }
  if (picture.columns && picture.metric === 'norm') {
    const ended = test => rows.map(row => {
      let j = picture.columns;
      while (j > 0 && test(picture.at(row.index, j - 1))) j--;
      return {row, from: j < picture.columns ? picture.starts[j] : null};
    }).filter(r => r.from !== null);
    const bad = ended(c => isBad('norm', c)), zero = ended(c => isZero('norm', c));
    const say = (found, what) => {
      const first = found.reduce((a, b) => (b.from < a.from ? b : a));
      return `${brief(found.map(r => r.row.name))}: ${what} since step ${grouped(first.from)}`;
    };
    if (bad.length) return {kind: 'bad', text: say(bad, 'NaN or Inf'), more: ''};
    if (zero.length) return {kind: 'warn', text: say(zero, 'no gradient flows (exactly zero)'), more: 'No incident was recorded: look whether this is meant.'};
  }
  if (!picture.columns) return {kind: 'calm', text: 'Nothing recorded in this range yet', more: ''};
  const info = incidents.length ? ` ${incidents.length} note${incidents.length > 1 ? 's' : ''} below.` : '';
  return {kind: 'good', text: `No incident: gradients reach all ${rows.length} rows up to step ${grouped(picture.end - 1)}`, more: info.trim()};
};

export const card = (incident, number, jump) => {
  const cause = incident.causes[0];
  const rest = incident.causes.slice(1, 3);
  const show = el('button', {type: 'button', className: 'jump', textContent: 'Show in the map'});
  show.addEventListener('click', () => jump());
  const why = cause
    ? el('p', {}, el('b', {textContent: 'Why '}), `${cause.meaning || cause.name} `,
      el('code', {textContent: cause.name}), cause.source ? ` in ${cause.source}` : '')
    : el('p', {}, el('b', {textContent: 'Why '}), 'measured, but not explained by anything checked');
  const facts = [...incident.evidence, ...(cause ? cause.evidence : [])];
  return el('article', {className: `card ${incident.severity}`, dataset: {incident: String(number)}},
    el('header', {},
      el('span', {className: 'badge', textContent: `#${number}`}),
      el('h3', {textContent: incident.title}),
      el('span', {className: 'since', textContent: since(incident)}),
      show),
    el('p', {className: 'where'}, ...incident.where.slice(0, 8).map(w => el('code', {textContent: w})),
      incident.where.length > 8 ? ` and ${incident.where.length - 8} more` : '',
      incident.source ? ` ${incident.source}` : ''),
    el('p', {textContent: incident.summary}),
    facts.length ? el('ul', {}, ...facts.map(f => el('li', {textContent: f}))) : null,
    why,
    ...rest.map(c => el('p', {className: 'or'}, el('b', {textContent: 'or '}), `${c.meaning || c.name} `, el('code', {textContent: c.name}))),
    incident.fix ? el('p', {className: 'fix'}, el('b', {textContent: 'Fix '}), incident.fix) : null,
    el('details', {}, el('summary', {textContent: 'The full message'}), el('pre', {textContent: incident.message})));
};
