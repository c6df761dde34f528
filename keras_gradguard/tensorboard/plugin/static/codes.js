// The int16 codes of the server (codes.py) and how they are said in words.

export const MISSING = -32768, NONE = -32767, ZERO = -32766, INF = 32766, NAN = 32767;
const LIMIT = 32000;

export const METRICS = {
  norm: {title: 'Gradient norm', log: true, short: 'norm'},
  zero_fraction: {title: 'Share of exact zeros', log: false, short: 'zeros'},
  update_ratio: {title: 'Update ratio |Δw| / |w|', log: true, short: 'update ratio'},
  nonfinite: {title: 'Number of NaN and Inf', log: false, short: 'NaN/Inf'},
  median: {title: 'Median |gradient entry|', log: true, short: 'median |g|'},
};

export const plain = code => code >= -LIMIT && code <= LIMIT;

/** True for a cell that means "nothing flows here": its colour is the zero colour. */
export const isZero = (metric, code) =>
  metric === 'zero_fraction' ? code === 10000 : metric !== 'nonfinite' && code === ZERO;

export const isBad = (metric, code) =>
  code >= INF || (metric === 'nonfinite' && code > 0 && plain(code));

export const isNone = code => code === NONE;

/** A power of ten as people write it: 1.3e-4, 0.02, 310. */
export const power = log10 => {
  const value = 10 ** log10;
  if (log10 >= -2 && log10 < 4) return String(Number(value.toPrecision(2)));
  return value > 0 && Number.isFinite(value) ? value.toExponential(1) : `1e${log10.toFixed(1)}`;
};

export const say = (metric, code) => {
  if (code === MISSING) return 'nothing recorded';
  if (code === NONE) return 'no gradient (None)';
  if (code === NAN) return 'NaN';
  if (code === INF) return 'Inf';
  if (code === ZERO) return 'exactly 0';
  if (metric === 'zero_fraction') return code === 10000 ? 'all zero (100 %)' : `${code / 100} % zero`;
  if (metric === 'nonfinite') return code === 0 ? 'none' : code >= LIMIT ? `${LIMIT} or more` : String(code);
  return power(code / 100);
};

/** Split the binary answer of ./matrix into its head and the codes, row by row. */
export const decode = buffer => {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  head.columns = head.starts.length;
  head.codes = new Int16Array(buffer, 4 + length);
  head.at = (row, column) => head.codes[row * head.columns + column];
  head.endOf = column => (column + 1 < head.columns ? head.starts[column + 1] : head.end);
  /** Column that holds a step, or -1. */
  head.columnAt = step => {
    if (!head.columns || step < head.starts[0] || step >= head.end) return -1;
    let low = 0, high = head.columns - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (head.starts[middle] <= step) low = middle; else high = middle - 1;
    }
    return low;
  };
  return head;
};
