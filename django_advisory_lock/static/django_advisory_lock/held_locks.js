'use strict';
{
    // Makes a node like a fresh one, and leaves alone whatever is the same: the focus, and where a screen reader is.
    // Elements with an id are told by it, all others by their place.
    const patch = function(old, fresh) {
        if (old.isEqualNode(fresh)) {
            return;
        }
        if (old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
            old.replaceWith(fresh);
            return;
        }
        if (old.nodeType !== Node.ELEMENT_NODE) {
            old.nodeValue = fresh.nodeValue;
            return;
        }
        for (const name of old.getAttributeNames().filter(name => !fresh.hasAttribute(name))) {
            old.removeAttribute(name);
        }
        for (const name of fresh.getAttributeNames()) {
            old.setAttribute(name, fresh.getAttribute(name));
        }
        patchChildren(old, fresh);
    };

    const patchChildren = function(old, fresh) {
        const wanted = new Set([...fresh.children].map(child => child.id));
        for (const child of [...old.children]) {
            if (child.id && !wanted.has(child.id)) {
                child.remove();
            }
        }
        let place = old.firstChild;
        for (const child of [...fresh.childNodes]) {
            let match = place;
            if (child.id) {
                match = [...old.children].find(other => other.id === child.id);
                if (match && match !== place) {
                    old.insertBefore(match, place);
                }
            } else if (place && (place.id || place.nodeName !== child.nodeName)) {
                match = null;
            }
            if (match) {
                place = match.nextSibling;
                patch(match, child);
            } else {
                old.insertBefore(child, place);
            }
        }
        while (place) {
            const next = place.nextSibling;
            place.remove();
            place = next;
        }
    };

    const start = function() {
        const box = document.getElementById('held-locks');
        const button = document.getElementById('held-locks-pause');
        const status = document.getElementById('held-locks-status');
        let paused = false;
        let timer = null;

        const say = function(what) {
            if (status.textContent !== status.dataset[what]) {  // said aloud, so only what is new
                status.textContent = status.dataset[what];
            }
        };

        const show = function(table) {
            const focused = box.contains(document.activeElement) ? document.activeElement : null;
            patch(document.getElementById('held-locks-table'), table);
            if (focused && document.activeElement !== focused) {  // its row has moved, or is gone
                (document.getElementById(focused.id) || box).focus({preventScroll: true});
            }
        };

        const refresh = async function() {
            try {
                const signal = AbortSignal.timeout(30000);
                const answer = await fetch(box.dataset.url, {redirect: 'error', cache: 'no-store', signal});
                const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
                const table = page.getElementById('held-locks-table');
                if (!answer.ok || !table) {
                    throw new Error(answer.statusText);
                }
                if (!paused) {
                    show(document.adoptNode(table));
                    say('running');
                }
            } catch {
                if (!paused) {
                    say('failed');
                }
            }
            plan();
        };

        const plan = function() {
            clearTimeout(timer);
            // Nobody looks at a page that is hidden, and to ask for it would keep its user logged in.
            if (!paused && !document.hidden) {
                timer = setTimeout(refresh, 1000 * box.dataset.seconds);
            }
        };

        const label = function() {
            button.textContent = paused ? button.dataset.resume : button.dataset.pause;
            say(paused ? 'paused' : 'running');
        };

        button.addEventListener('click', function() {
            paused = !paused;
            label();
            plan();
        });
        document.addEventListener('visibilitychange', function() {
            if (paused || document.hidden) {
                clearTimeout(timer);
            } else {
                refresh();
            }
        });
        button.hidden = false;
        label();
        plan();
    };

    if (document.getElementById('held-locks-table')) {
        start();
    }
}
