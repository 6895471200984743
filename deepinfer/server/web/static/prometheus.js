// Reading Prometheus' text format, and percentiles from histogram buckets.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const SPECIAL = { "+Inf": Infinity, "-Inf": -Infinity, NaN };

/** Map of metric name -> [{labels, value}]. */
export function parseMetrics(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    const value = match[3] in SPECIAL ? SPECIAL[match[3]] : Number(match[3]);
    if (!metrics.has(match[1])) metrics.set(match[1], []);
    metrics.get(match[1]).push({ labels, value });
  }
  return metrics;
}

/** Sum of a metric's samples; null if there are none. */
export function total(metrics, name) {
  const samples = metrics.get(name);
  return samples ? samples.reduce((sum, { value }) => sum + value, 0) : null;
}

/** Cumulative counts of a histogram: [[upper bound, count]], ascending, summed over its label sets. */
export function buckets(metrics, name) {
  const counts = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = labels.le in SPECIAL ? SPECIAL[labels.le] : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

/** What was observed between two readings of the same histogram. */
export function bucketsBetween(before, after) {
  return after.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
}

/** Quantile q in 0..1, linear inside its bucket as Prometheus' histogram_quantile has it; null without observations. */
export function quantile(q, cumulative) {
  const count = cumulative.at(-1)?.[1] ?? 0;
  if (!(count > 0)) return null;
  const rank = q * count;
  let lower = 0;
  let below = 0;
  for (const [bound, reached] of cumulative) {
    if (reached >= rank && reached > below) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / (reached - below);
    }
    lower = bound;
    below = reached;
  }
  return lower;
}
