// The page of a cluster's replicas. It reads /inspect/routes once a second; the key is sent in a header only.
"use strict";
const KEY = "pagedkv.inspector.key";
const PERIOD_MS = 1000;
const $ = (id) => document.getElementById(id);
let selected = null;
let latest = null;

function row(values, marked = false) {
  const line = document.createElement("tr");
  line.className = marked ? "chosen" : "";
  for (const value of values) {
    const cell = document.createElement("td");
    if (value instanceof Node) cell.append(value);
    else cell.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
    line.append(cell);
  }
  return line;
}

function fill(table, rows) {
  $(table).querySelector("tbody").replaceChildren(...rows);
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
  fill("replicas", replicas.map((each) => {
    const numbers = each.numbers;
    const used = numbers.num_blocks ? `${Math.round((100 * numbers.num_live) / numbers.num_blocks)} %` : "";
    return row([nameOf(each), `${each.process} on ${each.node}`, each.state, each.num_cached_blocks, numbers.num_running ?? "", numbers.num_waiting ?? "", used,
      each.num_prefill_tokens, each.num_decoding]);
  }));
}

function showDetails() {
  const choice = latest?.choices.find((each) => each.request === selected);
  $("details").hidden = !choice;
  if (!choice) return;
  $("details-title").textContent = `Request ${choice.request}: ${choice.num_prompt_tokens.toLocaleString("en")} tokens to ` +
    `${choice.replica}: ${choice.reason}`;
  fill("candidates", choice.candidates.map((each) => row([each.replica, each.state, each.num_hit_tokens,
    each.num_promised_tokens, inTiers(each.tier_tokens), each.num_prefill_tokens, each.num_decoding,
    each.cost.toLocaleString("en") + (each.is_over_share ? ", over its share" : "")], each.replica === choice.replica)));
}

function showChoices(choices) {
  fill("choices", choices.map((each) => {
    const again = each.num_answered_tokens ? ` (continued after ${each.num_answered_tokens} tokens)` : "";
    const line = row([each.request, new Date(1000 * each.at_s).toLocaleTimeString(), each.replica,
      each.num_prompt_tokens, each.candidates[0].num_hit_tokens, each.reason + again], each.request === selected);
    line.tabIndex = 0;
    const select = () => { selected = each.request; show(latest); };
    line.addEventListener("click", select);
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") select(); });
    return line;
  }));
}

function show(data) {
  latest = data;
  $("model").textContent = data.model;
  $("status").textContent = data.replicas.length === 0
    ? "No replica serves now."
    : `${data.replicas.length} replicas; ${data.num_moved} requests went on elsewhere after their replica was lost.`;
  $("reasons").textContent = Object.entries(data.reasons).map(([reason, count]) => `${count}: ${reason}`).join(" · ");
  const focused = document.activeElement?.closest?.("#choices tbody tr")?.rowIndex;
  showReplicas(data.replicas);
  showChoices(data.choices);
  showDetails();
  if (focused) $("choices").rows[focused]?.focus();
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
setInterval(read, PERIOD_MS);
read();
