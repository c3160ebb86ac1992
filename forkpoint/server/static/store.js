/* The browser's storage, shared by all tabs: a record for each conversation and one for each of its messages. A tab writes
   only messages that it changed itself, so that tabs never overwrite each other. Images are in picture_store.js. */

import { forgetPictures, getPictures, putPictures } from "./picture_store.js";
import { Talk, Tree, importedTree, recordOf } from "./talks.js";

const PREFIX = "forkpoint.talk.";
const LOST_MS = 10_000; // an answer without news for so long is no longer being written
export const BEAT_MS = 2000; // between two writes of an answer that waits

export function load(storage, name, otherwise) {
  try {
    return JSON.parse(window[storage].getItem("forkpoint." + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function save(storage, name, value) {
  try {
    window[storage].setItem("forkpoint." + name, JSON.stringify(value));
  } catch {
    /* storage is full or forbidden: go on without */
  }
}

const talkKey = (id) => PREFIX + id;
const nodeKey = (talk, node) => `${PREFIX}${talk.id}.${node.id}`;

/* {talkId, nodeId} of a key; nodeId is undefined for the record of a conversation. Null for other keys. */
export function readKey(key) {
  if (!key?.startsWith(PREFIX)) return null;
  const [talkId, nodeId] = key.slice(PREFIX.length).split(".");
  return { talkId, nodeId };
}

export function readKept(id) {
  try {
    const found = JSON.parse(localStorage.getItem(talkKey(id)));
    if (!found) return null;
    if (found.tree) return new Talk(importedTree(found.tree), { id, title: found.title }); // one record, as once written
    const tree = new Tree();
    for (const key of keys().filter((key) => key.startsWith(talkKey(id) + ".")).sort()) tree.put(JSON.parse(localStorage.getItem(key)));
    tree.applyChoices(found.chosen);
    for (const node of tree.nodes.values()) if (isLost(node)) interrupt(node);
    return new Talk(tree, { id, title: found.title });
  } catch {
    return null;
  }
}

/* Whether the tab that wrote an answer is gone. */
export function isLost(node) {
  return Boolean(node.streaming) && Date.now() - (node.seen ?? 0) > LOST_MS;
}

export function interrupt(node) {
  return Object.assign(node, { streaming: false, interrupted: true });
}

/* Reads the images of a conversation that readKept returned. True if there were any to read. */
export async function readPictures(talk) {
  const without = [...talk.tree.nodes.values()].filter((node) => node.pictures && !node.images);
  await Promise.all(
    without.map(async (node) => {
      const images = await getPictures(talk.id, node.pictures.id);
      node.images ??= images;
    }),
  );
  return without.length > 0;
}

/* False where the room is used up: then what is stored is as it was before. `lost` is called later if there is no room for
   images. */
export function keep(talk, lost = () => {}) {
  try {
    for (const node of talk.tree.unsaved) {
      if (node.pictures && node.images) putPictures(talk.id, node.pictures.id, node.images).catch(lost);
      localStorage.setItem(nodeKey(talk, node), JSON.stringify({ ...recordOf(node), seen: Date.now() }));
      talk.tree.unsaved.delete(node);
    }
    const { title, name } = talk;
    localStorage.setItem(talkKey(talk.id), JSON.stringify({ title, name, changed: Date.now(), chosen: talk.tree.choices() }));
    return true;
  } catch {
    return false;
  }
}

/* Stores an answer that is being written as one that the end of this page interrupts. */
export function keepInterrupted(talk, node) {
  try {
    localStorage.setItem(nodeKey(talk, node), JSON.stringify(interrupt(recordOf(node))));
  } catch {
    /* no room: what was stored before stays */
  }
}

export function forgetNode(talk, node) {
  localStorage.removeItem(nodeKey(talk, node));
}

export function forget(id) {
  for (const key of keys()) if (readKey(key).talkId === id) localStorage.removeItem(key);
  forgetPictures(id);
}

/* [{id, name, changed}], the latest first; with `words`, those whose name or messages have them. */
export function allKept(words = "") {
  let found = [];
  try {
    found = keys();
  } catch {
    return []; // storage is forbidden
  }
  const wanted = words.trim().toLowerCase();
  const matching = new Set();
  const talks = [];
  for (const key of found) {
    const { talkId: id, nodeId } = readKey(key);
    let record;
    try {
      record = JSON.parse(localStorage.getItem(key));
    } catch {
      record = { name: "A conversation that cannot be read" };
    }
    const text = nodeId ? `${record.content}` : `${record.name}`;
    if (text.toLowerCase().includes(wanted)) matching.add(id);
    if (!nodeId) talks.push({ id, name: String(record.name).slice(0, 200), changed: Number(record.changed) || 0 });
  }
  return talks.filter(({ id }) => matching.has(id)).sort((one, other) => other.changed - one.changed);
}

function keys() {
  return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
}
