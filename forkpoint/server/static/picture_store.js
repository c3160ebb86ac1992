/* Pictures of conversations. They are too large for localStorage, whose room all conversations share, so IndexedDB has
   them: under the id of their conversation and their own, a list of data URLs. */

const DATABASE = "forkpoint",
  PICTURES = "pictures";
const LAST_KEY = "\uffff"; // after all ids

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(PICTURES);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/* Calls `use` with the store, and returns the result of its request once the transaction is complete. */
async function inStore(mode, use) {
  const transaction = (await database()).transaction(PICTURES, mode);
  const request = use(transaction.objectStore(PICTURES));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export function putPictures(talkId, id, urls) {
  return inStore("readwrite", (store) => store.put(urls, [talkId, id]));
}

/* The pictures of an id; none where they are not kept or storage is forbidden. */
export async function getPictures(talkId, id) {
  try {
    return (await inStore("readonly", (store) => store.get([talkId, id]))) ?? [];
  } catch {
    return [];
  }
}

export async function forgetPictures(talkId) {
  try {
    await inStore("readwrite", (store) => store.delete(IDBKeyRange.bound([talkId, ""], [talkId, LAST_KEY])));
  } catch {
    /* storage is forbidden, so nothing is kept */
  }
}
