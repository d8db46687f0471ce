// Numbers as people read them.

/** 0.0123 -> "12 ms", 1.5 -> "1.50 s". */
export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return '–';
  if (value === 0) return '0';
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${Number.isInteger(value) ? value : value.toFixed(2)} s`;
  const ms = value * 1000;
  return `${ms >= 10 ? Math.round(ms) : ms.toFixed(1)} ms`;
}

/** 3.21 -> "3.2", 45.1 -> "45", 12345 -> "12.3k". */
export function compact(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (value >= 10 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(1);
}

/** 1048576 -> "1 MiB", 3221225472 -> "3.0 GiB". */
export function mebibytes(bytes) {
  const mib = bytes / 2 ** 20;
  return mib >= 1024 ? `${(mib / 1024).toFixed(1)} GiB` : `${Math.round(mib)} MiB`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

/** The value below which `share` of the weight lies; null if there is none.
 *  `samples` are [value, weight]. */
export function quantile(samples, share) {
  if (!samples.length) return null;
  const sorted = [...samples].sort((a, b) => a[0] - b[0]);
  const total = sorted.reduce((sum, [, weight]) => sum + weight, 0);
  let seen = 0;
  for (const [value, weight] of sorted) {
    seen += weight;
    if (seen >= total * share) return value;
  }
  return sorted.at(-1)[0];
}
