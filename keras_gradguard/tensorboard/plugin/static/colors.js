// A perceptually uniform map (viridis, by its published anchor values) and colours of their own
// for what is not a number on the scale. Zero is hatched as well: colour is not its only mark.

import {INF, MISSING, NAN, NONE, isBad, isZero, plain} from './codes.js';

const ANCHORS = [
  [68, 1, 84], [72, 35, 116], [64, 67, 135], [52, 94, 141], [41, 120, 142], [32, 144, 140],
  [34, 167, 132], [68, 190, 112], [121, 209, 81], [189, 222, 38], [253, 231, 37],
];

export const viridis = t => {
  const x = Math.max(0, Math.min(1, t)) * (ANCHORS.length - 1);
  const i = Math.min(ANCHORS.length - 2, Math.floor(x)), f = x - i;
  return ANCHORS[i].map((a, k) => Math.round(a + (ANCHORS[i + 1][k] - a) * f));
};

export const THEMES = {
  light: {zero: [224, 20, 76], bad: [0, 0, 0], none: [176, 176, 176], missing: [244, 244, 244],
    ink: '#1f2328', faint: '#6b7280', line: '#d0d7de', page: '#ffffff', accent: '#0b62d6'},
  dark: {zero: [240, 42, 98], bad: [255, 255, 255], none: [110, 110, 110], missing: [40, 42, 46],
    ink: '#e6e8eb', faint: '#9aa3ad', line: '#474c54', page: '#1f2124', accent: '#6cb0ff'},
};

export const css = rgb => `rgb(${rgb[0]}, ${rgb[1]}, ${rgb[2]})`;

/** Function from a code to [r, g, b] for one metric, range and theme. */
export const painter = (metric, [low, high], theme) => {
  const colors = THEMES[theme];
  return code => {
    if (code === MISSING) return colors.missing;
    if (code === NONE) return colors.none;
    if (isZero(metric, code)) return colors.zero;
    if (code === NAN || code === INF || isBad(metric, code)) return colors.bad;
    return viridis((code - low) / Math.max(high - low, 1));
  };
};

/** Range of the colour scale: the middle 98 % of the numbers, at least two decades wide. */
export const rangeOf = (metric, pictures) => {
  if (metric === 'zero_fraction') return [0, 10000];
  if (metric === 'nonfinite') return [0, 1];
  const seen = [];
  for (const picture of pictures) {
    const stride = Math.max(1, Math.floor(picture.codes.length / 20000));
    for (let i = 0; i < picture.codes.length; i += stride) {
      if (plain(picture.codes[i])) seen.push(picture.codes[i]);
    }
  }
  if (!seen.length) return [-600, 0];
  seen.sort((a, b) => a - b);
  let low = seen[Math.floor(0.01 * (seen.length - 1))], high = seen[Math.ceil(0.99 * (seen.length - 1))];
  if (high - low < 200) {
    const middle = (high + low) / 2;
    [low, high] = [middle - 100, middle + 100];
  }
  return [low, high];
};
