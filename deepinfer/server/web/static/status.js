// The status page: reads /metrics every second and draws what changed.

import { getJson, getText, setKey } from "./api.js";
import { make } from "./dom.js";
import { makeGraph, SECONDS } from "./graph.js";
import { buckets, bucketsBetween, parseMetrics, quantile, total } from "./prometheus.js";

const $ = (id) => document.getElementById(id);
const WINDOW = 30_000; // milliseconds that percentiles look back
const PERCENTILES = [["p50", "low", 0.5], ["p90", "mid", 0.9], ["p99", "high", 0.99]];

const whole = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value >= 100 ? whole(value) : String(Number(value.toFixed(1))));
const percent = (value) => `${Number((value * 100).toPrecision(2))}%`;

/** With two digits: percentiles of buckets are not known any better. */
function seconds(value) {
  if (value === 0) return "0";
  return value < 1 ? `${Number((value * 1000).toPrecision(2))} ms` : `${Number(value.toPrecision(2))} s`;
}

// Each reading of /metrics is {time, metrics}; a graph's values come from the latest reading and older ones.
const latest = (name) => ({ now }) => [total(now.metrics, name)];
const rate = (name) => ({ now, before }) => [perSecond(now, before, name)];

function perSecond(now, before, name) {
  if (!before) return null;
  const change = total(now.metrics, name) - total(before.metrics, name);
  return Math.max(0, change / ((now.time - before.time) / 1000)); // a restarted server counts from 0 again
}

/** Percentiles of what was observed in the window; all of them null if nothing was. */
function percentiles(name) {
  return ({ now, old }) => {
    if (!old) return PERCENTILES.map(() => null);
    const recent = bucketsBetween(buckets(old.metrics, name), buckets(now.metrics, name));
    return PERCENTILES.map(([, , q]) => quantile(q, recent));
  };
}

const one = [{ label: "now", color: "series-1" }];
const threePercentiles = PERCENTILES.map(([label, color]) => ({ label, color }));
const GRAPHS = [
  { title: "Generated tokens per second", series: one, format: short, floor: 10, read: rate("deepinfer:generation_tokens_total") },
  { title: "Prompt tokens per second", series: one, format: short, floor: 10, read: rate("deepinfer:prompt_tokens_total") },
  {
    title: "Requests", format: short, floor: 4,
    series: [{ label: "running", color: "series-1" }, { label: "waiting", color: "series-2" }],
    read: ({ now }) => ["running", "waiting"].map((state) => total(now.metrics, `deepinfer:num_requests_${state}`)),
  },
  { title: "Cache usage", series: one, format: percent, floor: 0.001, read: latest("deepinfer:kv_cache_usage_perc") },
  { title: "Time to first token", series: threePercentiles, format: seconds, read: percentiles("deepinfer:time_to_first_token_seconds") },
  { title: "Time per output token", series: threePercentiles, format: seconds, read: percentiles("deepinfer:inter_token_latency_seconds") },
  { title: "Whole request", series: threePercentiles, format: seconds, read: percentiles("deepinfer:e2e_request_latency_seconds") },
  { title: "Preemptions since the start", series: one, format: short, floor: 4, read: latest("deepinfer:num_preemptions_total") },
].map((graph) => ({ ...graph, ...makeGraph(graph), samples: [] }));
$("graphs").append(...GRAPHS.map(({ element }) => element));

const TILES = [
  ["Generating", "tokens/s", short, 0, 0],
  ["Running", "requests", short, 2, 0],
  ["Waiting", "requests", short, 2, 1],
  ["Cache in use", "", percent, 3, 0],
  ["TTFT p50", "", seconds, 4, 0],
  ["Per output token p50", "", seconds, 5, 0],
].map(([label, unit, format, graph, index]) => {
  const value = make("dd", {}, "–");
  $("tiles").append(make("div", {}, make("dt", {}, label), value));
  return { value, unit, format, graph, index };
});

let readings = [];

function draw(now) {
  // A restarted server begins again: older readings say nothing about it.
  const count = (reading) => total(reading.metrics, "deepinfer:generation_tokens_total") ?? 0;
  if (readings.length && count(readings.at(-1)) > count(now)) readings = [];
  const before = readings.at(-1);
  readings = [...readings, now].filter(({ time }) => now.time - time <= WINDOW);
  const context = { now, before, old: readings.length > 1 ? readings[0] : null };
  for (const graph of GRAPHS) {
    const sample = { time: now.time, values: graph.read(context) };
    graph.samples = [...graph.samples, sample].filter(({ time }) => now.time - time <= SECONDS * 1000);
    graph.update(graph.samples, now.time);
  }
  for (const { value, unit, format, graph, index } of TILES) {
    const shown = GRAPHS[graph].samples.at(-1).values[index];
    value.replaceChildren(...(shown === null ? ["–"] : [format(shown), " ", make("span", {}, unit)]));
  }
}

function health(text, kind) {
  if ($("health").textContent !== text) $("health").textContent = text;
  $("health").className = `health ${kind}`;
}

async function poll() {
  try {
    const text = await getText("/metrics", { signal: AbortSignal.timeout(5000) });
    draw({ time: performance.now(), metrics: parseMetrics(text) });
    const ready = await fetch("/ready", { cache: "no-store" });
    if (ready.ok) health("ready", "good");
    else health((await ready.json()).error.message, "bad");
    if (!$("info").tBodies[0].rows.length && $("key-form").hidden) await showInfo();
  } catch (error) {
    health(error.status ? error.message : "the server does not answer", "bad");
  }
}

// Server info -------------------------------------------------------------------------------------------------------

/** Nested settings as pairs of a name and a value, without those that were left to the default. */
function flatten(info) {
  return Object.entries(info).filter(([, value]) => value !== null).flatMap(([name, value]) =>
    typeof value === "object" && !Array.isArray(value) ? flatten(value) : [[name, value]],
  );
}

async function showInfo() {
  try {
    const info = await getJson("/server_info");
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
    const rows = flatten(info).map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, text(value))));
    $("info").tBodies[0].replaceChildren(...rows);
    $("key-form").hidden = true;
  } catch (error) {
    if (error.status !== 401) throw error;
    $("key-error").textContent = $("key-form").hidden ? "" : error.message;
    $("key-form").hidden = false;
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  void showInfo();
});

/** Once a second while the page is seen; the next reading waits for the one before. */
async function run() {
  if (!document.hidden) await poll();
  setTimeout(run, 1000);
}
void run();
