// The page of a cluster's replicas. It reads /inspect/routes once a second; the key is sent in a header only.
"use strict";
const KEY = "pagedkv.inspector.key";
const PERIOD_MS = 1000;
const $ = (id) => document.getElementById(id);
const details = document.querySelector("template").content.getElementById("details");
const candidates = details.querySelector("#candidates");
let selected = null;
let latest = null;

// Elements whose content is unchanged are left alone, so that text which the user has selected stays selected.
function write(element, value) {
  const text = value instanceof Node ? value.textContent : typeof value === "number" ? value.toLocaleString("en") : value;
  if (element.textContent !== text) element.replaceChildren(value instanceof Node ? value : text);
}

// A line has a key, which is that of its row, and the values of the row's cells.
function update(row, line) {
  row.className = line.marked ? "chosen" : "";
  line.values.forEach((value, place) => write(row.cells[place] ?? row.insertCell(), value));
  return row;
}

function newRow(key) {
  const row = document.createElement("tr");
  row.dataset.key = key;
  return row;
}

// Put the rows of these lines into a table; rows that are there already stay, and only those of other keys go.
function fill(table, lines, after = null) {
  const body = table.querySelector("tbody");
  const present = new Map(Array.from(body.rows, (row) => [row.dataset.key, row]));
  const rows = lines.map((line) => update(present.get(line.key) ?? newRow(line.key), line));
  if (after !== null) rows.splice(after + 1, 0, details);
  const kept = new Set(rows);
  for (const row of Array.from(body.rows)) if (!kept.has(row)) row.remove();
  rows.forEach((row, place) => { if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null); });
  return rows;
}

function nameOf(replica) {
  if (!replica.has_inspector) return replica.name;
  const link = document.createElement("a");
  link.href = `/replicas/${encodeURIComponent(replica.name)}/inspect`;
  link.textContent = replica.name;
  link.title = "The blocks of this replica";
  return link;
}

function inTiers(tokens) {
  return Object.entries(tokens).map(([medium, count]) => `${count.toLocaleString("en")} in ${medium}`).join(", ");
}

function showReplicas(replicas) {
  fill($("replicas"), replicas.map((each) => {
    const numbers = each.numbers;
    const used = numbers.num_blocks ? `${Math.round((100 * numbers.num_live) / numbers.num_blocks)} %` : "";
    return { key: each.name, values: [nameOf(each), `${each.process} on ${each.node}`,
      each.is_silent ? "silent" : each.state, each.num_cached_blocks, numbers.num_running ?? "",
      numbers.num_waiting ?? "", used, each.num_prefill_tokens, each.num_decoding] };
  }));
}

// A request that moved has a row for each replica, so a row is not named by the request alone.
function keyOf(choice) {
  return `${choice.request}/${choice.attempt}`;
}

function showDetails(choice) {
  write(details.querySelector("#details-title"), `Request ${choice.request}: ` +
    `${choice.num_prompt_tokens.toLocaleString("en")} tokens to ${choice.replica}: ${choice.reason}`);
  const passedOver = choice.passed_over.map((each) => ({ key: each.replica,
    values: [each.replica, `passed over, ${each.reason}`, ...Array(6).fill("")] }));
  fill(candidates, choice.candidates.map((each) => ({ key: each.replica, marked: each.replica === choice.replica,
    values: [each.replica, each.state, each.num_hit_tokens, each.num_promised_tokens, inTiers(each.tier_tokens),
      each.num_prefill_tokens, each.num_decoding,
      each.cost.toLocaleString("en") + (each.is_over_share ? ", over its share" : "")] })).concat(passedOver));
}

function cachedThere(candidate) {
  const tiers = inTiers(candidate.tier_tokens);
  return candidate.num_hit_tokens.toLocaleString("en") + (tiers ? `, and ${tiers}` : "");
}

function whyOf(choice) {
  const again = choice.num_answered_tokens ? `continued after ${choice.num_answered_tokens} tokens` : "begun again";
  return choice.reason + (choice.attempt > 1 ? ` (${again}, since its replica was lost)` : "");
}

function showChoices(choices) {
  const place = choices.findIndex((each) => keyOf(each) === selected);
  if (place >= 0) showDetails(choices[place]);
  const rows = fill($("choices"), choices.map((each) => ({ key: keyOf(each), marked: keyOf(each) === selected,
    values: [each.request, new Date(1000 * each.at_s).toLocaleTimeString(), each.replica, each.num_prompt_tokens,
      cachedThere(each.candidates[0]), whyOf(each)] })), place >= 0 ? place : null);
  for (const row of rows) {
    if (row === details) continue;
    row.tabIndex = 0;
    row.setAttribute("aria-expanded", String(row.dataset.key === selected));
  }
}

function select(row) {
  if (!row) return;
  selected = row.dataset.key === selected ? null : row.dataset.key;
  show(latest);
}

function show(data) {
  latest = data;
  write($("model"), data.model);
  write($("status"), data.replicas.length === 0
    ? "No replica can serve now: requests wait for a new one."
    : `Replicas: ${data.replicas.length}. Requests moved from a lost replica to another one: ${data.num_moved} times.`);
  write($("reasons"), Object.entries(data.reasons).map(([reason, count]) => `${count}: ${reason}`).join(" · "));
  showReplicas(data.replicas);
  showChoices(data.choices);
}

async function read() {
  const key = sessionStorage.getItem(KEY);
  if (document.body.dataset.access === "keys" && !key) {
    $("key-form").hidden = false;
    return;
  }
  try {
    const answer = await fetch("/inspect/routes", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (answer.status === 401 || answer.status === 403) {
      sessionStorage.removeItem(KEY);
      $("status").textContent = (await answer.json()).error.message;
      return;
    }
    show(await answer.json());
  } catch {
    $("status").textContent = "The server does not answer.";
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  read();
});
$("choices").addEventListener("click", (event) => {
  if (getSelection().isCollapsed) select(event.target.closest("tr[tabindex]"));  // else text was selected
});
$("choices").addEventListener("keydown", (event) => {
  if (event.key === "Enter") select(event.target.closest("tr[tabindex]"));
});
setInterval(read, PERIOD_MS);
read();
