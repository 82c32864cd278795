"use strict";
const $ = id => document.getElementById(id);
let state = null, busy = false, asked = 0;  // what the server said last; the number of questions to it

function make(name, text = "", attributes = {}) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;  // never markup
  return element;
}

async function ask(path, content) {  // every answer is the new state
  if (busy) return;
  busy = true; asked++;
  try {
    const answer = await fetch(path, content === undefined ? {} : {method: "POST", body: JSON.stringify(content),
      headers: {"Content-Type": "application/json"}});
    if (!answer.ok) throw new Error(await answer.text());
    state = await answer.json();
    $("error").hidden = true;
    show();
  } catch (error) {
    $("error").hidden = false;
    $("error").textContent = error instanceof TypeError ? "The server has stopped: start `[[COMMAND]]` again. Votes so far are kept."
                                                        : error.message;
  }
  busy = false;
}

addEventListener("keydown", event => {
  const choice = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (choice === undefined || event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  act(choice);
});
